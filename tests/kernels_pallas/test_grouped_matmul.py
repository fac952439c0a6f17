"""Rows times the kernels of their groups: tiles, and the Triton kernel in interpret mode against the definition."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.grouped_matmul import tile_of

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}


@functools.cache
def compiled(implementation: str, result: str):
    return jax.jit(functools.partial(ops.grouped_matmul, implementation=implementation, result=result))


def case(sizes: list[int], depth: int, width: int, dtype: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    seeds = jax.random.split(jax.random.key(sum(sizes)), 2)
    rows = jax.random.normal(seeds[0], (sum(sizes), depth)) * depth**-0.5
    return rows.astype(dtype), jax.random.normal(seeds[1], (len(sizes), depth, width)).astype(dtype), jnp.array(sizes)


def definition(rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> np.ndarray:
    """Group by group, in float64."""
    parts = np.split(np.asarray(rows, np.float64), np.cumsum(sizes)[:-1])
    return np.concatenate([part @ np.asarray(kernel, np.float64) for part, kernel in zip(parts, kernels, strict=True)])


@functools.partial(jax.jit, static_argnames="block_m")
def tiles_of(sizes: jax.Array, block_m: int) -> tuple[jax.Array, ...]:
    """As many tiles as six groups of up to 40 rows may have."""
    numbers = jnp.arange(240 // block_m + 6)
    return jax.vmap(lambda tile: tile_of(sizes, tile, block_m))(numbers)


@given(sizes=st.lists(st.integers(0, 40), min_size=6, max_size=6).filter(any), block_m=st.sampled_from([1, 4, 16]))
def test_tiles_cover_each_row_once_and_mix_no_groups(sizes: list[int], block_m: int):
    num_tiles = sum(sizes) // block_m + len(sizes)
    tiles = [np.asarray(each)[:num_tiles].tolist() for each in tiles_of(jnp.array(sizes), block_m)]
    seen = [(row, group) for group, start, count in zip(*tiles, strict=True) for row in range(start, start + count)]
    assert seen == list(enumerate(np.repeat(np.arange(len(sizes)), sizes).tolist()))
    assert max(tiles[2]) <= block_m


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    ("sizes", "depth", "width"),
    [
        ([1], 32, 16),
        ([5, 0, 2, 17], 96, 80),
        ([0, 0, 33], 130, 200),
        ([100, 156, 0, 44], 64, 72),
    ],
    ids=str,
)
def test_it_is_what_its_definition_says(implementation: str, sizes: list[int], depth: int, width: int, dtype: str):
    arguments = case(sizes, depth, width, dtype)
    found = np.asarray(compiled(implementation, "float32")(*arguments))
    np.testing.assert_allclose(found, definition(*arguments), rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("stored", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_kernels_in_8_bits_have_a_scale_for_each_column(implementation: str, stored: str):
    rows, kernels, sizes = case([5, 0, 2, 17], 96, 80, "bfloat16")
    kernels = (30 * kernels).astype(stored)
    scale = jax.random.uniform(jax.random.key(1), (len(sizes), 1, 80), minval=0.01, maxval=0.1)
    found = np.asarray(compiled(implementation, "float32")(rows, kernels, sizes, scale=scale))
    expected = definition(rows, np.asarray(kernels, np.float64) * np.asarray(scale, np.float64), sizes)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@settings(max_examples=10)
@given(sizes=st.lists(st.sampled_from([0, 3, 8, 20]), min_size=3, max_size=3).filter(any))
def test_any_sizes(sizes: list[int]):
    arguments = case(sizes, 48, 24, "float32")
    found = np.asarray(compiled("triton", "float32")(*arguments))
    np.testing.assert_allclose(found, definition(*arguments), rtol=0, atol=1e-5)


def test_a_row_that_is_not_finite_stays_alone():
    rows, kernels, sizes = case([5, 9], 32, 16, "float32")
    clean = np.asarray(compiled("triton", "float32")(rows, kernels, sizes))
    for bad in (jnp.nan, jnp.inf):
        found = np.asarray(compiled("triton", "float32")(rows.at[3, 4].set(bad), kernels, sizes))
        assert not np.isfinite(found[3]).any()
        assert np.array_equal(np.delete(found, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("sizes", [[0, 0, 0], [5, 0, 2], [0, 40, 0], [17, 4, 19]], ids=str)
def test_rows_behind_the_last_group_change_nothing(implementation: str, sizes: list[int]):
    """A device without a token, and one that has all of them; what is not its own may be anything."""
    rows, kernels, _ = case([40, 0, 0], 48, 24, "float32")
    num_own = sum(sizes)
    found = np.asarray(compiled(implementation, "float32")(rows.at[num_own:].set(jnp.nan), kernels, jnp.array(sizes)))
    expected = definition(rows[:num_own], kernels, jnp.array(sizes))
    np.testing.assert_allclose(found[:num_own], expected, rtol=0, atol=1e-5)


def test_the_result_has_the_type_that_was_asked_for():
    assert compiled("triton", "bfloat16")(*case([4], 32, 16, "bfloat16")).dtype == jnp.bfloat16


def test_types_that_differ_are_left_to_the_reference():
    rows, kernels, sizes = case([4], 32, 16, "float32")
    with pytest.raises(NotImplementedError, match="dtype"):
        ops.grouped_matmul(rows, kernels.astype("bfloat16"), sizes, result="float32", implementation="triton")
