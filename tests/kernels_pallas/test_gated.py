"""The gate of a feed-forward block as a CPU computes it, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.activation import Activation, ClampedGate
from jsg.kernels_pallas.native import library


@pytest.mark.parametrize("is_long", [True, False])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", ClampedGate(limit=2.5, slope=1.702)], ids=str)
def test_it_is_the_reference(activation: Activation, kind: str, is_long: bool, monkeypatch: pytest.MonkeyPatch):
    """For rows that fill items and do not, and for numbers that are small, large, infinite or none."""
    monkeypatch.setattr(library, "has_long_registers", lambda: is_long)
    inputs = [np.random.default_rng(n).standard_normal((n, 2, width)) * 4 for n, width in ((1, 16), (4, 48), (9, 160))]
    for numbers in inputs:
        numbers[0, 0, :6] = np.inf, -np.inf, np.nan, 100.0, -100.0, 0.0

    @jax.jit
    def both(inputs: list[jax.Array]) -> list[list[jax.Array]]:
        return [[ops.gated(x, activation, implementation=name) for x in inputs] for name in ("native", "reference")]

    tolerance = 1e-6 if kind == "float32" else 2**-7  # of bfloat16 the last bit
    # The reference's GELU subtracts nearly equal numbers for gates below zero, and machine code does not.
    least = 1e-35 if activation == "silu" else 1e-5
    for made, meant in zip(*both([numbers.astype(jnp.dtype(kind)) for numbers in inputs]), strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (made, meant)), rtol=tolerance, atol=least)


def test_gelu_is_that_of_the_page():
    gates = jnp.linspace(-6, 6, 96, dtype=jnp.float32)
    made = ops.gated(jnp.stack([gates, jnp.ones(96)])[None], "gelu_tanh", implementation="native")[0]
    exact = np.asarray(gates, np.float64)
    exact *= 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    np.testing.assert_allclose(made, exact, rtol=5e-6)


def test_a_clamped_gate_is_that_of_the_page():
    gates, ups = np.meshgrid(np.r_[-np.inf, -8:9:0.5, np.inf], [-np.inf, -8.0, -7.0, -0.5, 0.0, 3.0, 7.0, 8.0, np.inf])
    gate_up = np.stack([gates.ravel(), ups.ravel()])[None].astype(np.float32)
    made = ops.gated(jnp.asarray(gate_up), ClampedGate(limit=7.0, slope=1.702), implementation="reference")[0]
    gate, up = np.minimum(gate_up[0, 0], 7.0).astype(np.float64), np.clip(gate_up[0, 1], -7.0, 7.0).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    np.testing.assert_allclose(made, expected, rtol=1e-6)


def test_rows_that_fill_no_vector_are_for_the_reference():
    gate_up = jnp.ones((2, 2, 20))
    with pytest.raises(NotImplementedError, match="multiple of 16"):
        ops.gated(gate_up, implementation="native")
    assert ops.gated(gate_up).shape == (2, 20)


def test_what_is_asked_for_short_registers_is_not_remembered_for_long_ones(monkeypatch: pytest.MonkeyPatch):
    before = library.rounds_to_bfloat16()
    with monkeypatch.context() as patched:
        patched.setattr(library, "has_long_registers", lambda: False)
        assert not library.rounds_to_bfloat16()
    assert library.rounds_to_bfloat16() == before
