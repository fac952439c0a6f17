"""Residual add and norm: the kernel, in interpret mode, against the definition in float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.add_and_norm import MAX_WIDTH


def both(width: int, dtype, implementation: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(width)
    x, update = (jnp.asarray(rng.standard_normal((3, width)), dtype) for _ in range(2))
    weight = jnp.asarray(rng.uniform(0.5, 2, width), dtype)
    total, normed = ops.add_and_norm(x, update, weight, 1e-5, implementation=implementation)
    exact = np.asarray(x, np.float64) + np.asarray(update, np.float64)
    scale = np.sqrt(np.mean(exact**2, axis=-1, keepdims=True) + 1e-5)
    assert total.dtype == normed.dtype == x.dtype
    return (
        np.asarray(total, np.float64),
        np.asarray(normed, np.float64),
        exact,
        np.asarray(weight, np.float64) * exact / scale,
    )


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize(("width", "dtype", "tolerance"), [(64, jnp.float32, 1e-6), (96, jnp.bfloat16, 0.02)])
def test_equals_the_definition(width: int, dtype, tolerance: float, implementation: str):
    total, normed, exact_total, exact_normed = both(width, dtype, implementation)
    np.testing.assert_allclose(total, exact_total, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(normed, exact_normed, rtol=tolerance, atol=tolerance)


def test_a_row_that_is_not_finite_is_alone():
    x = jnp.ones((3, 64)).at[1, 5].set(jnp.nan)
    total, normed = ops.add_and_norm(x, jnp.ones((3, 64)), jnp.ones(64), 1e-5, implementation="triton")
    assert np.isnan(normed[1]).all() and np.isnan(total[1]).sum() == 1
    assert np.isfinite(normed[::2]).all()


def test_a_row_that_is_too_wide_falls_back_unless_the_kernel_is_named():
    x, weight = jnp.ones((1, MAX_WIDTH + 1)), jnp.ones(MAX_WIDTH + 1)
    with pytest.raises(NotImplementedError, match=f"at most {MAX_WIDTH}"):
        ops.add_and_norm(x, x, weight, 1e-5, implementation="triton")
    assert ops.add_and_norm(x, x, weight, 1e-5)[1].shape == x.shape
