"""Rows times a kernel in 4 bits, in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.few_bits import Quantised
from jsg.kernels_pallas.form import Form

FORMS = {
    "jsg": Form("int4", 32, "bfloat16", is_exact=True),
    "w4a16": Form("int4", 128, "bfloat16"),
    "w4a16 of channels": Form("int4", None, "float16"),
    "awq": Form("int4", 64, "float16", has_zero=True),
    "gptq with an order": Form("int4", 128, "float32", has_zero=True, has_order=True),
    "mxfp4": Form("e2m1", 32, "float8_e8m0fnu"),
    "nvfp4": Form("e2m1", 16, "float8_e4m3fn", has_factor=True),
    "q4_k": Form("uint4", 32, "int8", has_zero=True, has_factor=True, has_step=True, block=128),
}
DEPTH, OUT = 384, (5, 16)


def made(form: Form, depth: int = DEPTH, out: tuple[int, ...] = OUT) -> Quantised:
    """A kernel of every code, with scales of both signs where their type has them, zero and tiny ones among them."""
    rng = np.random.default_rng(0)
    groups, blocks = ((1 if length is None else depth // length, *out) for length in (form.group, form.block))
    scale = rng.normal(0, 0.1, groups) * rng.choice([1, 2.0**-4, 0], groups, p=[0.8, 0.1, 0.1])
    scale = np.abs(scale) + 2.0**-127 if form.scale == "float8_e8m0fnu" else scale
    scale = scale * 100 if form.scale == "int8" else scale
    return Quantised(
        jnp.asarray(rng.integers(0, 256, (depth // 2, *out), np.uint8)),
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
    """With the weights of `Quantised.restored`, in float64. A factor of channels is not rounded into them."""
    factor = kernel.factor if kernel.form.block is None else None
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
    rounded = 0.1 if kernel.factor is not None else 2e-5
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


def test_what_it_does_not_take_is_refused():
    x, kernel = rows(2), made(FORMS["jsg"])
    with pytest.raises(NotImplementedError, match="rows of 16, not int4 and float32"):
        ops.matmul(x.astype("float32"), kernel, implementation="triton")
    in_8_bits = Quantised(jnp.zeros((DEPTH, *OUT), jnp.int8), kernel.scale, Form("int8", 32, "bfloat16"))
    with pytest.raises(NotImplementedError, match="wants 4 bits and rows of 16, not int8"):
        ops.matmul(x, in_8_bits, implementation="triton")
    with pytest.raises(NotImplementedError, match="an even number of inputs in a group, not 3"):
        ops.matmul(x, kernel._replace(scale=jnp.zeros((DEPTH // 3, *OUT), jnp.bfloat16)), implementation="triton")
