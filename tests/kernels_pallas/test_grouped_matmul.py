"""Rows times the kernels of their groups: tiles, and the Triton kernel in interpret mode against the definition.

The sizes of groups are data, so one program serves them all: rows behind the last group belong to nobody.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.activation import Activation, ClampedGate
from jsg.kernels_pallas.grouped_matmul import MOST_AT_ONCE, tile_of
from jsg.kernels_pallas.inputs import GroupKernels, SharedKernels
from jsg.kernels_pallas.reference_routes import Routes
from tests.kernels_pallas.definition import QUICKLY

TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
NUM_ROWS, DEPTH, WIDTH = 64, 130, 72  # neither depth nor width is a multiple of a block
SIZES = ([5, 0, 2, 17], [0, 0, 33, 0], [16, 15, 17, 16], [0, 64, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0])


@functools.cache
def compiled(implementation: str, result: str = "float32"):
    product = functools.partial(ops.grouped_matmul, implementation=implementation, result=result)
    return jax.jit(product, compiler_options=QUICKLY)


def case(sizes: list[int], dtype: str = "float32", *, rows: int = NUM_ROWS, depth: int = DEPTH, width: int = WIDTH):
    """Rows, kernels and sizes; rows behind the last group are not numbers."""
    rng = np.random.default_rng(sum(sizes))
    x = rng.normal(size=(rows, depth)).astype(np.float32) * np.float32(depth**-0.5)
    x[sum(sizes) :] = np.nan
    kernels = rng.normal(size=(len(sizes), depth, width)).astype(np.float32)
    return x.astype(jnp.dtype(dtype)), kernels.astype(jnp.dtype(dtype)), np.array(sizes)


def definition(rows: np.ndarray, kernels: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Group by group, in float64."""
    parts = np.split(np.asarray(rows, np.float64)[: sum(sizes)], np.cumsum(sizes)[:-1])
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


@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_it_is_what_its_definition_says(implementation: str, sizes: list[int]):
    """Of a device without a row too, and of one that has all of them."""
    arguments = case(sizes)
    found = np.asarray(compiled(implementation)(*arguments))
    np.testing.assert_allclose(found[: sum(sizes)], definition(*arguments), rtol=0, atol=TOLERANCES["float32"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("implementation", ["triton", "reference"])
@pytest.mark.parametrize(
    ("sizes", "depth", "width"),
    [([1], 32, 16), ([5, 0, 2, 17], 96, 80), ([0, 0, 33], 130, 200), ([100, 156, 0, 44], 64, 72)],
    ids=str,
)
def test_it_is_what_its_definition_says_in_other_shapes(
    implementation: str, sizes: list[int], depth: int, width: int, dtype: str
):
    arguments = case(sizes, dtype, rows=sum(sizes), depth=depth, width=width)
    found = np.asarray(compiled(implementation)(*arguments))
    np.testing.assert_allclose(found, definition(*arguments), rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize(
    ("implementation", "stored"),
    [
        ("triton", "float8_e4m3fn"),
        ("reference", "int8"),
        pytest.param("triton", "int8", marks=pytest.mark.slow),
        pytest.param("reference", "float8_e4m3fn", marks=pytest.mark.slow),
    ],
)
def test_kernels_in_8_bits_have_a_scale_for_each_column(implementation: str, stored: str):
    rows, kernels, sizes = case(SIZES[0], "bfloat16")
    kernels = (30 * kernels.astype(np.float32)).astype(jnp.dtype(stored))
    scale = np.random.default_rng(1).uniform(0.01, 0.1, size=(len(sizes), 1, WIDTH)).astype(np.float32)
    found = np.asarray(compiled(implementation)(rows, kernels, sizes, scale=scale))
    expected = definition(rows, np.asarray(kernels, np.float64) * np.asarray(scale, np.float64), sizes)
    np.testing.assert_allclose(found[: sum(sizes)], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_a_bias_is_added_to_the_rows_of_its_group(implementation: str):
    rows, kernels, sizes = case(SIZES[0])
    rng = np.random.default_rng(2)
    bias = rng.normal(size=(len(sizes), WIDTH)).astype(jnp.bfloat16)
    scale = rng.uniform(0.5, 2, size=(len(sizes), 1, WIDTH)).astype(np.float32)
    each = np.repeat(bias.astype(np.float64), sizes, axis=0)
    for factors in ({}, {"scale": scale}):
        found = np.asarray(compiled(implementation)(rows, kernels, sizes, bias=bias, **factors))
        expected = definition(rows, kernels * factors.get("scale", 1), sizes) + each
        np.testing.assert_allclose(found[: sum(sizes)], expected, rtol=0, atol=TOLERANCES["float32"])


@settings(max_examples=30)
@given(sizes=st.lists(st.integers(0, NUM_ROWS // 4), min_size=4, max_size=4))
def test_any_sizes(sizes: list[int]):
    arguments = case(sizes)
    found = np.asarray(compiled("triton")(*arguments))
    np.testing.assert_allclose(found[: sum(sizes)], definition(*arguments), rtol=0, atol=TOLERANCES["float32"])


def test_a_row_that_is_not_finite_stays_alone():
    rows, kernels, sizes = case([20, 20, 20, 4])
    clean = np.asarray(compiled("triton")(rows, kernels, sizes))
    for bad in (np.nan, np.inf):
        broken = rows.copy()
        broken[3, 4] = bad
        found = np.asarray(compiled("triton")(broken, kernels, sizes))
        assert not np.isfinite(found[3]).any()
        assert np.array_equal(np.delete(found, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_the_result_has_the_type_that_was_asked_for(implementation: str):
    arguments = case([4, 0, 0, 0], "bfloat16")
    for result in ("bfloat16", "float32"):
        assert jax.eval_shape(compiled(implementation, result), *arguments).dtype == jnp.dtype(result)


@pytest.mark.parametrize(
    ("activation", "dtype", "has_more"),
    [
        ("silu", "bfloat16", False),
        ("relu2", "float32", False),
        (ClampedGate(limit=1.0, slope=1.7), "float32", True),
        pytest.param("gelu_tanh", "float32", True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gates_are_in_the_launch_of_their_products(activation: Activation, dtype: str, has_more: bool):
    """As in launches of their own, of rows in any order, also with scales and biases of each kernel."""
    rows, kernels, sizes = case(SIZES[0], dtype)
    rng = np.random.default_rng(3)
    tokens = rng.permutation(NUM_ROWS).astype(np.int32)
    more = [
        [rng.uniform(0.5, 1.5, (len(sizes), *each)).astype(np.float32) for each in ((1, WIDTH), (WIDTH,))] for _ in "ab"
    ]
    given = [
        GroupKernels(each, *(extra if has_more else ()))
        for each, extra in zip((kernels, kernels[::-1]), more, strict=True)
    ]
    given = given[:1] if activation == "relu2" else given
    by = {
        how: jax.jit(
            functools.partial(ops.grouped_gated, activation=activation, result=dtype, implementation=how),
            compiler_options=QUICKLY,
        )
        for how in ("triton", "reference")
    }
    shuffled = np.zeros_like(rows)
    shuffled[tokens] = rows
    found, apart = (np.asarray(run(shuffled, tokens, given, sizes), np.float32) for run in by.values())
    live = slice(sum(sizes))
    np.testing.assert_allclose(found[live], apart[live], rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    in_order = np.asarray(by["triton"](rows, None, given, sizes), np.float32)
    np.testing.assert_array_equal(in_order[live], found[live])


SHARED = {"float32": 40, "bfloat16": 7}


@pytest.mark.parametrize(("activation", "dtype"), [("silu", "bfloat16"), ("relu2", "float32")])
def test_the_block_of_all_tokens_is_in_the_launches_of_experts(activation: Activation, dtype: str):
    """It is what it is alone, and so are the copies, though tokens and groups fill no tile."""
    rng = np.random.default_rng(4)
    num_tokens, sizes = SHARED[dtype], jnp.array(SIZES[0])
    tokens = jnp.asarray(rng.integers(0, num_tokens, NUM_ROWS), jnp.int32)
    routes = Routes(jnp.zeros((1, 1)), jnp.zeros((1, 1), jnp.int32), tokens, sizes)
    x = jnp.asarray(rng.normal(size=(num_tokens, DEPTH)), dtype)
    parts = 1 if activation == "relu2" else 2
    opened, joint, down, shared_down = (
        jnp.asarray(rng.normal(size=shape) / np.sqrt(DEPTH), dtype)
        for shape in ((parts, 4, DEPTH, WIDTH), (DEPTH, parts, WIDTH), (4, WIDTH, DEPTH), (WIDTH, DEPTH))
    )
    kernels, last = [GroupKernels(each) for each in opened], GroupKernels(down)
    how: dict[str, Any] = {"result": dtype, "implementation": "triton"}
    both = jax.jit(functools.partial(ops.experts_beside, activation=activation, **how), compiler_options=QUICKLY)
    made, share = both(x, routes, kernels, last, SharedKernels(joint, shared_down))
    inner = ops.grouped_gated(x, tokens, kernels, sizes, activation, **how)
    alone = ops.grouped_matmul(inner, down, sizes, **how)
    live = slice(sum(SIZES[0]))
    np.testing.assert_array_equal(np.asarray(made)[live], np.asarray(alone)[live])
    inner = ops.gated(jnp.einsum("td,dpf->tpf", x, joint).astype(dtype), activation)
    np.testing.assert_allclose(
        np.asarray(share, np.float32),
        np.asarray(inner @ shared_down, np.float32),
        rtol=TOLERANCES[dtype],
        atol=TOLERANCES[dtype],
    )


def test_other_shared_blocks_have_launches_of_their_own():
    """Those of other sizes or types, with scales, of many rows, and on a CPU."""
    x, places = jnp.zeros((8, 32)), jnp.zeros((8, 2), jnp.int32)
    routes = Routes(jnp.zeros((8, 2)), places, places.reshape(16), jnp.zeros(4, jnp.int32))
    kernels, down = [GroupKernels(jnp.zeros((4, 32, 16)))] * 2, GroupKernels(jnp.zeros((4, 16, 32)))
    shared = SharedKernels(jnp.zeros((32, 2, 16)), jnp.zeros((16, 32)))
    many = routes._replace(tokens=jnp.zeros(MOST_AT_ONCE + 1, jnp.int32))
    for changed in (
        (x, routes, kernels, down, shared._replace(opened=jnp.zeros((32, 2, 24)), down=jnp.zeros((24, 32)))),
        (x, routes, kernels, down, shared._replace(down=jnp.zeros((16, 32), "bfloat16"))),
        (x, routes, kernels, down._replace(scale=jnp.zeros((4, 1, 32))), shared),
        (x, many, kernels, down, shared),
    ):
        assert ops.experts_beside(*changed, "silu", result="float32", implementation="triton") is None
    assert ops.experts_beside(x, routes, kernels, down, shared, "silu", result="float32") is None


def test_many_rows_have_launches_of_their_own():
    rows, kernels, sizes = map(jnp.asarray, case(SIZES[0], rows=MOST_AT_ONCE + 1))
    with pytest.raises(NotImplementedError, match="at most 512 rows"):
        ops.grouped_gated(
            rows, None, [GroupKernels(kernels)], sizes, "relu2", result="float32", implementation="triton"
        )


def test_types_that_differ_are_left_to_the_reference():
    rows, kernels, sizes = map(jnp.asarray, case([4, 0, 0, 0]))
    with pytest.raises(NotImplementedError, match="dtype"):
        ops.grouped_matmul(rows, kernels.astype("bfloat16"), sizes, result="float32", implementation="triton")
