"""Attention over latent rows, whose first numbers are values, by each implementation against its definition."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cases as cases
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import AttentionInputs
from tests.kernels_pallas.definition import QUICKLY, TOLERANCES, named

WIDTHS = {"published": (576, 512), "small": (48, 32), "padded": (64, 48), "narrow": (288, 256)}
"""Numbers of a row, and of its value. The smaller ones are those of goldens."""
PLAIN = [case for case in cases.CASES if case.window is None and case.softcap is None and not case.has_sinks]
"""What the families with latent rows have."""
FAST = {
    ("reference", "mixed", "small"),
    ("native", "mixed", "small"),
    ("native", "mixed", "published"),
    ("triton", "mixed", "small"),
    ("triton", "mixed", "published"),
    ("triton", "decode", "padded"),
    ("triton", "shared", "small"),
}


@functools.cache
def compiled(implementation: str, value_dim: int, scale: float) -> Callable[..., jax.Array]:
    def run(queries: jax.Array, rows: jax.Array, inputs: AttentionInputs) -> jax.Array:
        how = {"scale": scale, "value_dim": value_dim, "implementation": implementation}
        return ops.latent_attention(queries, (rows,), inputs, **how)

    return jax.jit(run, compiler_options=QUICKLY)


def check(
    case: cases.Case, value_dim: int, implementation: str, dtype: str = "float32", pool_dtype: str | None = None
) -> None:
    """A batch in which all rows have one token is a step without tiles."""
    arrays = cases.make(case, dtype=dtype, pool_dtype=pool_dtype, latent=True)
    inputs = arrays.inputs
    if case in cases.DECODE:
        inputs = inputs._replace(**{name: x[:0] for name, x in inputs._asdict().items() if name.startswith("tile_")})
    out = compiled(implementation, value_dim, case.head_dim**-0.5)(arrays.queries, arrays.keys, inputs)
    assert out.shape[-1] == value_dim and out.dtype == jnp.dtype(dtype)
    num_real = len(arrays.expected)
    found, expected = np.asarray(out, np.float32), arrays.expected[..., :value_dim]
    np.testing.assert_allclose(found[:num_real], expected, atol=2 * TOLERANCES[dtype])
    assert not found[num_real:].any(), "padding tokens give zero"


def mark(implementation: str, name: str, widths: str) -> tuple[pytest.MarkDecorator, ...]:
    """What is neither fast nor of steps that have all kinds of rows is long."""
    if (implementation, name, widths) in FAST:
        return ()
    return (pytest.mark.slow,) if name in ("decode", "mixed") else (pytest.mark.slow, pytest.mark.long)


@pytest.mark.parametrize(
    ("implementation", "case", "widths"),
    [
        pytest.param(
            implementation,
            case,
            widths,
            marks=mark(implementation, case.name, widths),
            id=f"{implementation}-{case.name}-{widths}",
        )
        for implementation in ("reference", "native", "triton")
        for case in PLAIN
        for widths in WIDTHS
        if widths == "small" or case.name in ("decode", "mixed", "pages-of-16")
    ],
)
def test_values_may_be_the_first_numbers_of_keys(implementation: str, case: cases.Case, widths: str):
    """One row for all query heads, of which there are five."""
    head_dim, value_dim = WIDTHS[widths]
    check(dataclasses.replace(case, heads=5, kv_heads=1, head_dim=head_dim), value_dim, implementation)


@pytest.mark.parametrize("name", ["decode-pages-of-16", "mixed"])
def test_programs_divide_more_heads_than_a_matmul_has_rows(name: str):
    """Of 48 heads each program has 24 of at most 32."""
    check(dataclasses.replace(named(name), heads=48, kv_heads=1, head_dim=48), 32, "triton", "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("pool_dtype", ["float32", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", ["decode", "mixed"])
def test_rows_may_be_of_any_type(name: str, pool_dtype: str):
    dtype = "float32" if pool_dtype == "float32" else "bfloat16"
    check(dataclasses.replace(named(name), heads=20, kv_heads=1, head_dim=96), 64, "triton", dtype, pool_dtype)


@pytest.mark.parametrize(("head_dim", "value_dim"), [(40, 32), (72, 40), (1088, 1024), (800, 512)])
def test_the_kernel_says_which_widths_it_does_not_take(head_dim: int, value_dim: int):
    case = dataclasses.replace(named("decode"), heads=2, kv_heads=1, head_dim=head_dim)
    with pytest.raises(
        NotImplementedError, match=rf"at most 512 \+ 256, but got {value_dim} \+ {head_dim - value_dim};"
    ):
        check(case, value_dim, "triton")


def test_a_row_that_is_not_finite_is_nan_for_those_who_see_it_only():
    """Its value is zeros, and its key NaN, so what masks it may multiply it by zero."""
    rows = jnp.ones((3, 1, 8)).at[1, 0, 2].set(jnp.inf).at[2, 0, 0].set(jnp.nan)
    (pool,) = ops.write_latents((jnp.zeros((4, 2, 1, 8)),), jnp.array([3, 5, 0]), rows)
    found = np.asarray(pool).reshape(8, 8)
    assert (found[3] == 1).all()
    assert np.isnan(found[5, -1]) and not found[5, :-1].any()
    assert not found[[0, 1, 2, 4, 6, 7]].any(), "the dump slot takes zeros whatever a token has"
