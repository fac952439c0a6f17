"""Products of e4m3 with e4m3: the Triton kernels in interpret mode, and the reference, against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import fp8_rounding, ops, reference_fp8
from jsg.kernels_pallas.fp8_matmul import BLOCK
from jsg.kernels_pallas.inputs import Fp8Kernel, GroupKernels
from tests.kernels_pallas.definition import QUICKLY

DEPTH, WIDTH, SIZES = 2 * BLOCK, 40, (3, 0, 18, 2)
IMPLEMENTATIONS = ("triton", "reference")
GROUPS = {"channel": 1, "blocks": DEPTH // BLOCK, "short blocks": DEPTH // 32}
TOLERANCE = 1e-5
"""Of a sum of about 20: the definition is in float64."""


def rows(count: int, dtype: str = "bfloat16") -> np.ndarray:
    return np.random.default_rng(1).normal(size=(count, DEPTH)).astype(jnp.dtype(dtype))


def kernel(groups: int, *lead: int) -> Fp8Kernel:
    rng = np.random.default_rng(sum(lead))
    values = rng.normal(0, 100, (*lead, WIDTH, DEPTH)).clip(-448, 448).astype(jnp.float8_e4m3fn)
    return Fp8Kernel(jnp.asarray(values), jnp.asarray(rng.uniform(1e-3, 2e-3, (*lead, groups, WIDTH)), jnp.float32))


in_reference = jax.jit(reference_fp8.rounded, static_argnums=1, compiler_options=QUICKLY)


def restored(x: np.ndarray, groups: int) -> np.ndarray:
    """Rows after they were rounded, in float64."""
    made = in_reference(x, groups)
    scale = np.repeat(np.asarray(made.scale, np.float64), DEPTH // groups, axis=1)
    return np.asarray(made.values, np.float64) * scale


def wide(of: Fp8Kernel) -> np.ndarray:
    """A kernel [..., D, F], or those of experts, in float64."""
    scale = np.repeat(np.asarray(of.scale, np.float64), DEPTH // of.scale.shape[-2], axis=-2)
    return np.swapaxes(np.asarray(of.values, np.float64), -1, -2) * scale


@functools.cache
def compiled(operation: str, implementation: str, **how):
    product = functools.partial(getattr(ops, operation), implementation=implementation, **dict(how))
    return jax.jit(product, compiler_options=QUICKLY)


@pytest.mark.parametrize("groups", [1, 4, 3], ids=str)
def test_rows_are_rounded_to_the_nearest_number(groups: int):
    """No number is off by more than a sixteenth of it, or half of the least step of its group."""
    x = np.random.default_rng(0).normal(size=(5, 3 * 4 * 16)).astype(np.float32)
    x[3, 0:48] = 0
    made, in_triton = (f(jax.device_put(x), groups) for f in (in_reference, interpreted_rounding))
    jax.tree.map(np.testing.assert_array_equal, made, in_triton)
    scale = np.repeat(np.asarray(made.scale), x.shape[1] // groups, axis=1)
    off = np.abs(np.asarray(made.values, np.float32) * scale - x)
    assert (off <= np.maximum(np.abs(x) / 16, scale * 2.0**-10) * (1 + 1e-6)).all()
    per_group = np.abs(np.asarray(made.values, np.float32)).reshape(5, groups, -1).max(2)
    assert set(np.unique(per_group)) <= {0.0, 448.0}


def interpreted_rounding(x: jax.Array, groups: int) -> reference_fp8.Fp8Rows:
    return fp8_rounding.rounded(x, groups, interpret=True)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("weight", ["bfloat16", "float32"])
def test_norms_and_gates_are_rounded_as_after_launches_of_their_own(groups: int, weight: str):
    """But for a rounding to bfloat16 of a sum in another order, which moves some to the next number that e4m3 has."""
    depth, rng = 3 * 4 * 16, np.random.default_rng(3)
    x, more, gates = (jnp.asarray(rng.normal(size=(5, *shape, depth)), jnp.bfloat16) for shape in ((), (), (2,)))
    of = Fp8Kernel(None, jnp.ones((groups, 8)))
    factor = jnp.asarray(rng.normal(size=depth), weight)
    for operation, given in (
        ("normed_rows", (x, None, factor, 1e-5, of)),
        ("normed_rows", (x, more, factor, 1e-5, of)),
        ("gated_rows", (gates, "silu", of)),
        ("gated_rows", (gates[:, :1], "relu2", of)),
    ):
        found, expected = (getattr(ops, operation)(*given, implementation=each) for each in IMPLEMENTATIONS)
        if operation == "normed_rows":
            np.testing.assert_array_equal(found[0], expected[0])
            assert (found[0] is x) == (given[1] is None)
            found, expected = found[1], expected[1]
        np.testing.assert_allclose(found.scale, expected.scale, rtol=2**-6)
        a, b = (np.asarray(each.values, np.float32) for each in (found, expected))
        np.testing.assert_allclose(a, b, rtol=0.125, atol=2.0**-9)
        assert (a == b).mean() > 0.9


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_product_is_that_of_what_was_rounded(implementation: str, groups: int):
    x, of = rows(3), kernel(groups)
    out = compiled("matmul", implementation)(x, of._replace(values=of.values.reshape(2, -1, DEPTH),
                                                            scale=of.scale.reshape(groups, 2, -1)))  # fmt: skip
    assert out.shape == (3, 2, WIDTH // 2)
    np.testing.assert_allclose(out.reshape(3, -1), restored(x, groups) @ wide(of), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_each_expert_multiplies_its_own_rows(implementation: str, groups: int):
    """Rows behind the last group are not numbers, and change nothing."""
    x, of, bias = rows(sum(SIZES) + 2), kernel(groups, len(SIZES)), np.arange(len(SIZES), dtype=np.float32)[:, None]
    x[sum(SIZES) :] = np.nan
    bias = np.broadcast_to(bias, (len(SIZES), WIDTH)).astype(jnp.bfloat16)
    product = compiled("grouped_matmul", implementation, result="float32")
    out = product(x, of, np.array(SIZES), bias=bias)[: sum(SIZES)]
    parts = np.split(restored(x[: sum(SIZES)], groups), np.cumsum(SIZES)[:-1])
    expected = [part @ each + number for number, (part, each) in enumerate(zip(parts, wide(of), strict=True))]
    np.testing.assert_allclose(out, np.concatenate(expected), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_gates_in_the_launch_of_their_products_are_those_of_launches_of_their_own(groups: int):
    x, count = rows(7), sum(SIZES)
    tokens = np.random.default_rng(2).integers(0, len(x), count)
    kernels = [GroupKernels(kernel(groups, len(SIZES)))] * 2
    made = [
        compiled("grouped_gated", implementation, activation="silu", result="float32")(
            x, tokens, kernels, np.array(SIZES)
        )
        for implementation in IMPLEMENTATIONS
    ]
    assert made[0].dtype == jnp.bfloat16 and np.abs(np.asarray(made[0], np.float32)).max() > 1
    np.testing.assert_allclose(*(np.asarray(each, np.float32) for each in made), rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_has_the_same_result_beside_other_rows(implementation: str):
    """Also beside one that is not finite, whose own result is not."""
    x, of = rows(5), kernel(2)
    product = compiled("matmul", implementation)
    expected = np.asarray(product(x, of))
    other = np.concatenate([x[:2], 100 * x[:3]])
    other[3, 5] = np.inf
    found = np.asarray(product(other, of))
    np.testing.assert_array_equal(found[:2], expected[:2])
    assert np.isnan(found[3]).all() and np.isfinite(found[[2, 4]]).all()


def test_groups_that_no_block_fills_are_left_to_the_reference():
    of = kernel(16)
    with pytest.raises(NotImplementedError, match="a multiple of 32 inputs in a group, not 16"):
        ops.matmul(jnp.asarray(rows(2)), of, implementation="triton")
