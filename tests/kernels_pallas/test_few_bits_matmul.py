"""Rows times a kernel in few bits, or one of each expert, in interpret mode. Tests on a GPU use the same cases."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import few_bits_block, few_bits_matmul, ops
from jsg.kernels_pallas.few_bits import TYPES, Quantised
from jsg.kernels_pallas.form import NUMBERS_OF_4_BITS, Form
from jsg.kernels_pallas.inputs import GroupKernels
from tests.kernels_pallas.definition import QUICKLY

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
    product = functools.partial(ops.matmul, result=result, implementation=implementation)
    return jax.jit(product, compiler_options=QUICKLY)


restored_by = jax.jit(Quantised.restored, static_argnums=1, compiler_options=QUICKLY)


def product(x: jax.Array, kernel: Quantised) -> np.ndarray:
    """With the weights of `Quantised.restored`, in float64. What multiplies a channel is not rounded into them."""
    factor = kernel.factor if kernel.form.block is None else None
    if kernel.form.scales_columns:
        factor, kernel = kernel.scale, kernel._replace(scale=jnp.ones_like(kernel.scale))
    restored = kernel if factor is None else kernel._replace(factor=None)
    restored = restored_by(restored, x.dtype)
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


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in QUICK[2:] else pytest.mark.slow) for each in FORMS]
)
def test_on_a_tpu_it_is_the_product_with_the_restored_kernels(name: str):
    """Of two kernels whose results stand side by side, and of one for each group of rows, which end before the rows."""
    form, sizes = dataclasses.replace(FORMS[name], has_order=False), np.array([3, 0, 9])
    x, kernels = rows(16), made(form, out=(128,), lead=(3,))
    is_rounded = form.scales_columns  # by the reference: see `product`
    how = {"rtol": 2e-6, "atol": 0.2 if is_rounded else 4e-5}
    beside, expected = (np.asarray(compiled(each)(x, kernels)) for each in ("tpu", "reference"))
    np.testing.assert_allclose(beside, expected, **how)
    grouped = functools.partial(ops.grouped_matmul, result="float32", implementation="tpu")
    found = jax.jit(grouped, compiler_options=QUICKLY)(x, kernels, sizes)
    row = np.arange(12)
    np.testing.assert_allclose(found[:12], expected[row, np.repeat(np.arange(3), sizes)], **how)


SHAPES = (1, 256, (8,)), (40, 640, (200,)), (300, 128, (3, 2, 24))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count", "depth", "out"),
    [
        pytest.param(name, *shape, marks=() if (i + j) % 3 == 0 else pytest.mark.long)
        for i, name in enumerate(FORMS)
        for j, shape in enumerate(SHAPES)
    ],
)
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
    grouped = functools.partial(ops.grouped_matmul, result="float32", implementation="triton")
    found = jax.jit(grouped, compiler_options=QUICKLY)(x, kernels[0], sizes, bias=bias)
    np.testing.assert_allclose(found[:20], exact + np.asarray(bias, np.float64)[expert], rtol=0, atol=4e-5)
    gated = [GroupKernels(each, bias=bias) for each in kernels]
    how = {"activation": "silu", "result": jnp.float32}
    each_of = (functools.partial(ops.grouped_gated, implementation=each, **how) for each in ("triton", "reference"))
    made_of = (jax.jit(each, compiler_options=QUICKLY)(x, None, gated, sizes)[:20] for each in each_of)
    np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in made_of), rtol=0.02, atol=0.02)


def result_of(instructions: str, dtype: str, words: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the instructions for a card make of arrays of words, by the names of operands."""
    at, short = dict(words), jnp.dtype(dtype)

    def value(name: str) -> np.ndarray:
        return np.asarray(at[name] if name in at else int(name, 0), np.uint32)

    def halves(word: np.ndarray) -> np.ndarray:
        return np.stack([word & 0xFFFF, word >> 16], -1).astype(np.uint16).view(short).astype(np.float64)

    def rounded(both: np.ndarray) -> np.ndarray:
        return both.astype(short).view(np.uint32)[..., 0]

    def prmt(first: np.ndarray, second: np.ndarray, selected: np.ndarray) -> np.ndarray:
        both = [word >> 8 * i & 255 for word in (first, second) for i in range(4)]
        return sum(both[int(selected) >> 4 * i & 7] << 8 * i for i in range(4))

    def of_float32(operation: Any) -> Any:
        return lambda *operands: operation(*(each.view(np.float32) for each in operands)).view(np.uint32)

    operations = {
        "mov.b32": lambda word: word,
        "shl.b32": np.left_shift,
        "shr.u32": np.right_shift,
        "and.b32": np.bitwise_and,
        "prmt.b32": prmt,
        "lop3.b32": lambda a, b, c, table: (a & b) | c,
        "mul.rn.f32": of_float32(np.multiply),
        "sub.rn.f32": of_float32(np.subtract),
    }
    for line in instructions.strip("{} ").rstrip(";").split("; "):
        operation, *names = line.replace(",", " ").replace("{", "").replace("}", "").split()
        if operation.startswith(".reg"):
            continue
        if names[0] == "half0":
            both = halves(value(names[2]))
            at["half0"], at["half1"] = both[..., 0], both[..., 1]
        elif operation.startswith("fma.rn"):
            a, b, c = (halves(value(name)) for name in names[1:])
            at[names[0]] = rounded(a * b + c)
        elif operation.startswith("cvt.f32"):
            at[names[0]] = at[names[1]].astype(np.float32).view(np.uint32)
        elif operation.startswith("cvt.rn"):
            at[names[0]] = rounded(np.stack([value(name).view(np.float32) for name in names[:0:-1]], -1))
        else:
            assert names[4:] in ([], ["0xea"])
            at[names[0]] = np.asarray(operations[operation](*map(value, names[1:])), np.uint32)
    return {name: halves(np.asarray(word)) for name, word in at.items() if name in ("$0", "$1", "$2", "$3")}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_a_card_makes_of_every_byte(dtype: str):
    """Interpret mode cannot run these instructions, so they are followed here: numbers, less a zero, and weights."""
    short = jnp.dtype(dtype)
    byte = np.random.default_rng(0).permuted(np.tile(np.arange(256, dtype=np.uint32), (4, 1)), axis=1)
    scale, offset = np.asarray(0.371, dtype), np.float32(0.123)
    words = {"$4": sum(byte[i] << 8 * i for i in range(4))}
    in_both = {"scale": np.asarray([scale] * 2).view(np.uint32)}
    wide = {"scale": np.float32(scale).view(np.uint32), "offset": offset.view(np.uint32)}
    for numbers, zero in itertools.product(NUMBERS_OF_4_BITS, (None, -7, 8)):
        form = Form(numbers, 32)
        less = {} if zero is None else {"less": few_bits_block.line_of(form, short)[1] - zero}
        less = {name: np.asarray([each] * 2, short).view(np.uint32) for name, each in less.items()}
        for of_weight, kind in (({}, short), (in_both, short), (wide, np.float32)):
            given = less | of_weight
            at = words | {f"${5 + 4 * n + i}": word for n, word in enumerate(given.values()) for i in range(4)}
            found = result_of(few_bits_block.nibbles_to_weights(form, short, kind, tuple(given)), dtype, at)
            for i in range(4):
                codes = np.stack([byte[i] & 15, byte[i] >> 4], -1)
                meant = np.asarray(NUMBERS_OF_4_BITS[numbers])[codes] - (zero or 0)
                if of_weight is in_both:
                    meant = (meant * float(scale)).astype(short)
                elif of_weight:
                    meant = (meant.astype(np.float32) * np.float32(scale) - offset).astype(short)
                np.testing.assert_array_equal(found[f"${i}"], meant.astype(np.float64))
        codes = jnp.arange(16, dtype=jnp.uint8)
        np.testing.assert_array_equal(few_bits_block.numbers_of(codes, form), NUMBERS_OF_4_BITS[numbers])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_a_card_makes_of_every_scale_of_few_bits_and_every_int8(dtype: str):
    short, form = jnp.dtype(dtype), FORMS["jsg"]
    scale = np.arange(16, 32) * np.float64(2.0**-9)  # five significant bits
    codes, scale = (each.ravel() for each in np.meshgrid(np.arange(16, dtype=np.uint32), scale))
    line = [np.asarray(each * scale, short).view(np.uint16) for each in few_bits_block.line_of(form, short)]
    at = {f"${5 + 4 * n + i}": each.astype(np.uint32) * 0x10001 for n, each in enumerate(line) for i in range(4)}
    at |= {"$4": codes * 0x11111111}
    found = result_of(few_bits_block.nibbles_to_weights(form, short, short, ("factor", "less")), dtype, at)
    for each in found.values():
        np.testing.assert_array_equal(each, np.stack([(codes - 8.0) * scale] * 2, -1))
    byte = np.arange(256, dtype=np.uint32)
    word = byte | byte << 8 | (255 - byte) << 16 | 7 << 24
    found = result_of(few_bits_block.bytes_to_numbers(short), dtype, {"$2": word})
    whole = byte.astype(np.uint8).view(np.int8)
    np.testing.assert_array_equal(found["$0"], np.stack([whole, whole], -1))
    np.testing.assert_array_equal(found["$1"], np.stack([whole[::-1], np.full(256, 7)], -1))


def test_what_it_does_not_take_is_refused():
    x, kernel = rows(2), made(FORMS["jsg"])
    with pytest.raises(NotImplementedError, match="rows of 16 bits, not float32"):
        ops.matmul(x.astype("float32"), kernel, implementation="triton")
    with pytest.raises(NotImplementedError, match="an even number of inputs in a group, not 3"):
        ops.matmul(x, kernel._replace(scale=jnp.zeros((DEPTH // 3, *OUT), jnp.bfloat16)), implementation="triton")
