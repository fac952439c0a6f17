"""Rows times a kernel in few bits, or one of each expert, in interpret mode. Tests on a GPU use the same cases."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import few_bits_block, few_bits_matmul, ops
from jsg.kernels_pallas.few_bits import TYPES, Quantised
from jsg.kernels_pallas.form import NUMBERS_OF_4_BITS, Form
from jsg.kernels_pallas.inputs import GroupKernels

FORMS = {
    "jsg": Form("int4", 32, "bfloat16", is_exact=True),
    "w4a16": Form("int4", 128, "bfloat16"),
    "w4a16 of channels": Form("int4", None, "float16"),
    "awq": Form("int4", 64, "float16", has_zero=True),
    "gptq with an order": Form("int4", 128, "float32", has_zero=True, has_order=True),
    "mxfp4": Form("e2m1", 32, "float8_e8m0fnu"),
    "nvfp4": Form("e2m1", 16, "float8_e4m3fn", has_factor=True),
    "int8": Form("int8"),
    "w8a16": Form("int8", 128, "bfloat16", has_zero=True),
    "blocks of fp8": Form("e4m3", 128, "float32"),
    "q4_k": Form("uint4", 32, "int8", has_zero=True, has_factor=True, has_step=True, block=128),
}
LARGEST = {"int4": 8, "uint4": 8, "e2m1": 8, "int8": 128, "e4m3": 448}
"""About the largest number of each kind."""
DEPTH, OUT = 384, (5, 16)


def made(form: Form, depth: int = DEPTH, out: tuple[int, ...] = OUT, lead: tuple[int, ...] = ()) -> Quantised:
    """A kernel of every code, with scales of both signs where their type has them, zero and tiny ones among them.

    There is one for each expert of `lead`, if there are any. What would be no number in e4m3 is zero.
    """
    rng = np.random.default_rng(0)
    groups, blocks = ((*lead, 1 if each is None else depth // each, *out) for each in (form.group, form.block))
    scale = rng.normal(0, 0.8 / LARGEST[form.numbers], groups) * rng.choice([1, 2.0**-4, 0], groups, p=[0.8, 0.1, 0.1])
    scale = np.abs(scale) + 2.0**-127 if form.scale == "float8_e8m0fnu" else scale
    scale = scale * 100 if form.scale == "int8" else scale
    numbers = rng.integers(0, 256, (*lead, depth // form.per_byte, *out), np.uint8)
    return Quantised(
        jnp.asarray(np.where(numbers & 127 == 127, 0, numbers).astype(np.uint8).view(TYPES[form.numbers])),
        jnp.asarray(scale.astype(jnp.dtype(form.scale))),
        form,
        jnp.asarray(rng.integers(-8, 8, groups, np.int8)) if form.has_zero else None,
        jnp.asarray(rng.uniform(0.005, 0.02, blocks), jnp.float32) if form.has_factor else None,
        jnp.asarray(rng.permutation(depth), jnp.int32) if form.has_order else None,
        jnp.asarray(rng.uniform(0.005, 0.02, blocks), jnp.float32) if form.has_step else None,
    )


def rows(count: int, depth: int = DEPTH) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=(count, depth)), jnp.bfloat16)


@functools.cache
def compiled(implementation: str = "triton", result: str = "float32"):
    return jax.jit(functools.partial(ops.matmul, result=result, implementation=implementation))


def product(x: jax.Array, kernel: Quantised) -> np.ndarray:
    """With the weights of `Quantised.restored`, in float64. What multiplies a channel is not rounded into them."""
    factor = kernel.factor if kernel.form.block is None else None
    if kernel.form.scales_columns:
        factor, kernel = kernel.scale, kernel._replace(scale=jnp.ones_like(kernel.scale))
    restored = (kernel if factor is None else kernel._replace(factor=None)).restored(x.dtype)
    sums = np.tensordot(np.asarray(x, np.float64), np.asarray(restored, np.float64), 1)
    return sums if factor is None else sums * np.asarray(factor, np.float64)


QUICK = ("jsg", "gptq with an order", "mxfp4", "nvfp4", "q4_k")
"""Those that have all parts and types of numbers, so that others are slow."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in FORMS]
)
def test_it_is_the_product_with_the_restored_kernel(name: str):
    x, kernel = rows(3), made(FORMS[name])
    found, reference = (np.asarray(compiled(how)(x, kernel)) for how in ("triton", "reference"))
    np.testing.assert_allclose(found, product(x, kernel), rtol=0, atol=2e-5)
    is_rounded = kernel.factor is not None or kernel.form.scales_columns  # by the reference, with what a channel has
    rounded = 0.1 if is_rounded else 2e-5
    np.testing.assert_allclose(found, reference, rtol=0, atol=rounded)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(("count", "depth", "out"), [(1, 256, (8,)), (40, 640, (200,)), (300, 128, (3, 2, 24))])
def test_it_is_so_in_other_shapes(name: str, count: int, depth: int, out: tuple[int, ...]):
    x, kernel = rows(count, depth), made(FORMS[name], depth, out)
    np.testing.assert_allclose(compiled()(x, kernel), product(x, kernel), rtol=0, atol=4e-5)


@pytest.mark.slow
def test_groups_need_not_be_a_power_of_two():
    x, kernel = rows(2, 480), made(Form("int4", 96, "bfloat16"), 480)
    np.testing.assert_allclose(compiled()(x, kernel), product(x, kernel), rtol=0, atol=2e-5)


def test_a_row_is_the_same_alone_and_in_a_batch():
    x, kernel = rows(16), made(FORMS["awq"])
    together = np.asarray(compiled()(x, kernel))
    np.testing.assert_array_equal(compiled()(x[5:6], kernel)[0], together[5])


def test_a_row_that_is_not_finite_stays_alone():
    x, kernel = rows(3), made(FORMS["jsg"])
    clean, broken = (np.asarray(compiled()(each, kernel)) for each in (x, x.at[1, 7].set(jnp.nan)))
    assert np.isnan(broken[1]).all()
    np.testing.assert_array_equal(broken[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_the_result_has_the_type_that_was_asked_for(implementation: str):
    for result in ("bfloat16", "float32"):
        shape = jax.eval_shape(compiled(implementation, result), rows(2), made(FORMS["jsg"]))
        assert shape.dtype == jnp.dtype(result) and shape.shape == (2, *OUT)


def test_inputs_in_parts_give_the_same_sums():
    x, kernel = rows(2, 2048), made(FORMS["w4a16"], 2048)
    cut = few_bits_matmul.default_sizes(2, x.dtype, 2)
    assert few_bits_matmul.num_blocks_of_part(cut, 2, 2048, 80) == few_bits_matmul.LEAST_BLOCKS < 2048 // cut.block_k
    np.testing.assert_allclose(compiled()(x, kernel), product(x, kernel), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["mxfp4", *(pytest.param(each, marks=pytest.mark.slow) for each in ("awq", "w8a16", "q4_k"))]
)
def test_experts(name: str):
    """Each row is multiplied by its expert's kernel, alone and behind gates."""
    x, sizes = rows(24), np.array([5, 0, 12, 3])
    kernels = [made(FORMS[name], out=(80,), lead=(4,)) for _ in range(2)]
    kernels[1] = kernels[1]._replace(values=kernels[1].values[::-1])
    bias = jnp.asarray(np.random.default_rng(2).normal(size=(4, 80)), jnp.bfloat16)
    expert = np.repeat(np.arange(4), sizes)
    alone = [jax.tree.map(lambda part, e=e: part[e], kernels[0]) for e in range(4)]
    exact = np.stack([product(x[row : row + 1], alone[e])[0] for row, e in enumerate(expert)])
    found = jax.jit(functools.partial(ops.grouped_matmul, result="float32", implementation="triton"))(
        x, kernels[0], sizes, bias=bias
    )
    np.testing.assert_allclose(found[:20], exact + np.asarray(bias, np.float64)[expert], rtol=0, atol=4e-5)
    gated = [GroupKernels(each, bias=bias) for each in kernels]
    how = {"activation": "silu", "result": jnp.float32}
    made_of = {
        each: jax.jit(functools.partial(ops.grouped_gated, implementation=each, **how))(x, None, gated, sizes)[:20]
        for each in ("triton", "reference")
    }
    np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in made_of.values()), rtol=0.02, atol=0.02)


def result_of(instructions: str, words: np.ndarray, other: np.ndarray, dtype: str) -> np.ndarray:
    """What the instructions for a card make of two arrays of words, each half by itself."""
    at: dict[str, np.ndarray | int] = {"$1": words, "$2": other}

    def value(name: str) -> Any:
        return int(name, 16) if name.startswith("0x") else at[name]

    def halves(name: str) -> np.ndarray:
        word = np.asarray(value(name), np.uint32)
        return np.stack([word & 0xFFFF, word >> 16], -1).astype(np.uint16).view(jnp.dtype(dtype)).astype(np.float64)

    for line in instructions.strip("{} ").rstrip(";").split(";")[1:]:
        operation, *names = line.replace(",", " ").split()
        if operation == "mov.b32":
            at[names[0]] = value(names[1])
        elif operation == "lop3.b32":
            assert names[4] == "0xea"
            at[names[0]] = (value(names[1]) & value(names[2])) | value(names[3])
        else:
            assert operation == f"fma.rn.{ {'bfloat16': 'bf16', 'float16': 'f16'}[dtype] }x2" and names[0] == "$0"
            return halves(names[1]) * halves(names[2]) + halves(names[3])
    raise AssertionError("nothing was made")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("numbers", ["int4", "uint4", "e2m1"])
def test_what_a_card_makes_of_every_byte(numbers: str, dtype: str):
    """Interpret mode cannot run these instructions, so they are followed here."""
    form, codes = Form(numbers, 32), np.arange(256, dtype=np.uint8)
    words = np.asarray(few_bits_block.codes_in_words(jnp.asarray(codes), form, jnp.dtype(dtype)))
    for zero in (0,) if numbers == "e2m1" else (0, -7, 8):
        offset = few_bits_block.offset_of(form, jnp.dtype(dtype)) + zero
        both = np.asarray([-offset] * 2, jnp.dtype(dtype)).view(np.uint32)
        found = result_of(few_bits_block.instructions(form, jnp.dtype(dtype)), words, both, dtype)
        meant = np.asarray(NUMBERS_OF_4_BITS[numbers])[np.stack([codes & 15, codes >> 4], -1)] - zero
        np.testing.assert_array_equal(found, meant)
        np.testing.assert_array_equal(few_bits_block.numbers_of(jnp.asarray(codes & 15), form), meant[:, 0] + zero)


def test_what_it_does_not_take_is_refused():
    x, kernel = rows(2), made(FORMS["jsg"])
    with pytest.raises(NotImplementedError, match="rows of 16 bits, not float32"):
        ops.matmul(x.astype("float32"), kernel, implementation="triton")
    with pytest.raises(NotImplementedError, match="an even number of inputs in a group, not 3"):
        ops.matmul(x, kernel._replace(scale=jnp.zeros((DEPTH // 3, *OUT), jnp.bfloat16)), implementation="triton")
