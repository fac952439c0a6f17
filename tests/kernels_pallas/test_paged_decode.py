"""`paged_decode` in interpret mode against attention by its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cases as cases
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.attention_block import Attended
from jsg.kernels_pallas.paged_decode import Sizes, paged_decode
from jsg.window import Window
from tests.kernels_pallas import definition
from tests.kernels_pallas.definition import named, with_garbage, with_room

EDGES = "decode-without-padding"
attend, check = (functools.partial(function, paged_decode) for function in (definition.attend, definition.check))


def sizes(splits: int, block_k: int) -> Sizes:
    return Sizes(splits, block_k, num_warps=4, num_stages=3)


@pytest.mark.parametrize(
    ("name", "splits", "block_k"),
    [
        ("decode", 2, 32),
        (EDGES, 2, 32),
        ("decode-sinks", 3, 16),
        ("decode-window", 1, 16),
        ("decode-aligned-window", 1, 16),
        ("decode-pages-of-16", 3, 16),
    ],
)
def test_equals_the_definition(name: str, splits: int, block_k: int):
    check(named(name), sizes(splits, block_k))


@pytest.mark.slow
@pytest.mark.parametrize("case", cases.DECODE, ids=lambda case: case.name)
@pytest.mark.parametrize(("splits", "block_k"), [pytest.param(1, 64, marks=pytest.mark.long), (3, 16)])
def test_equals_the_definition_in_the_whole_table(case: cases.Case, splits: int, block_k: int):
    """The table without splits is long: a fast test has one such case, and one split joins nothing."""
    check(case, sizes(splits, block_k), has_room=False)


@pytest.mark.parametrize(
    ("model", "name", "dtype", "pool_dtype"),
    [
        pytest.param("phi-3-mini", "decode-pages-of-64", "bfloat16", None, marks=pytest.mark.slow),
        ("gemma-2b", "decode-softcap", "bfloat16", "float8_e4m3fn"),
    ],
)
def test_equals_the_definition_with_the_heads_of_real_models(model: str, name: str, dtype: str, pool_dtype: str | None):
    check(cases.for_model(named(name), model), sizes(2, 32), dtype, pool_dtype, has_room=False)


TYPES = (
    ("decode", "float32", None),
    ("decode-pages-of-16", "bfloat16", None),
    ("decode", "bfloat16", "float8_e4m3fn"),
    ("decode-pages-of-16", "bfloat16", "float8_e5m2"),
)
CORNERS = dict(zip(TYPES, ("qwen2.5-7b", "llama-3-8b", "llama-3.2-1b", "gemma-2b"), strict=True))
"""Each type with the heads of another model. Those with a head of keys for each head of queries cost most."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name", "dtype", "pool_dtype"),
    [
        pytest.param(model, *types, marks=() if CORNERS[types] == model else pytest.mark.long)
        for types in TYPES
        for model in cases.MODELS
    ],
)
def test_equals_the_definition_in_every_shape_and_type(model: str, name: str, dtype: str, pool_dtype: str | None):
    """All but one model of each type are long."""
    check(cases.for_model(named(name), model), sizes(2, 32), dtype, pool_dtype, has_room=False)


@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_garbage_in_unused_pages_is_never_read_into_a_result(splits: int):
    case = named("decode-pages-of-16")
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays, sizes(splits, 16))
    arrays = with_garbage(arrays, key=np.nan, value=np.nan)
    last_page = arrays.inputs.page_table[2, 1]  # of a row of 32 tokens of which the last is made one of the future
    arrays.keys[last_page, 15] = arrays.values[last_page, 15] = np.nan
    lens = arrays.inputs.single_kv_lens
    inputs = arrays.inputs._replace(single_kv_lens=lens.at[1].add(-1))
    shorter = attend(case, dataclasses.replace(arrays, inputs=inputs), sizes(splits, 16))
    assert np.isfinite(shorter.out).all()
    rows = np.array([0, 2, 3])
    np.testing.assert_array_equal(shorter.out[rows], clean.out[rows])
    np.testing.assert_array_equal(shorter.lse[rows], clean.lse[rows])


@pytest.mark.parametrize(("window", "cut"), [(None, sizes(2, 32)), (Window(32), sizes(1, 16))], ids=["all", "window"])
def test_a_key_that_is_not_a_number_reaches_who_sees_it_only(window: Window | None, cut: Sizes):
    case = dataclasses.replace(named("decode"), window=window)
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays, cut)
    for row, position in ((2, 120), (3, 40)):  # of 131 and 301 keys
        arrays.keys[np.asarray(arrays.inputs.page_table)[row + 1, position], 0, 1] = np.nan
    found = attend(case, arrays, cut)
    is_hit = np.zeros(found.lse.shape, bool)
    is_hit[[2] if window else [2, 3], case.heads // case.kv_heads :] = True
    assert np.isnan(found.out[is_hit]).all()
    assert np.isnan(found.lse[is_hit]).all()
    np.testing.assert_array_equal(found.out[~is_hit], clean.out[~is_hit])
    np.testing.assert_array_equal(found.lse[~is_hit], clean.lse[~is_hit])


@pytest.mark.slow
def test_is_what_the_op_runs_for_a_decode_step():
    """With the sizes that the op chooses; which kernel runs for which step, `test_ops` shows."""
    case = named("decode-without-padding")
    arrays = cases.make(case)
    no_tiles = {part: arrays.inputs.tile_rows[:0] for part in arrays.inputs._fields if part.startswith("tile_")}
    inputs = arrays.inputs._replace(**no_tiles)
    found = ops.paged_attention(
        jnp.asarray(arrays.queries),
        (jnp.asarray(arrays.keys), jnp.asarray(arrays.values)),
        inputs,
        scale=case.head_dim**-0.5,
        implementation="triton",
    )
    np.testing.assert_allclose(found, arrays.expected, atol=3e-6)


@pytest.mark.parametrize("head_dim", [40, 528])
def test_says_what_it_cannot_do(head_dim: int):
    case = cases.Case("no", ((3, 1),), head_dim=head_dim)
    with pytest.raises(NotImplementedError, match=r"but got (40|528); the implementation 'reference' takes any"):
        attend(case, cases.make(case), sizes(1, 16))


def test_refuses_an_8_bit_pool_that_its_offsets_do_not_reach():
    arrays = cases.make(named("decode-without-padding"))
    head_dim = arrays.queries.shape[2]
    pool = jax.ShapeDtypeStruct((2**31 // head_dim + 1, 1, 1, head_dim), "float8_e4m3fn")

    def run(keys: jax.Array, values: jax.Array) -> Attended:
        return paged_decode(
            jnp.asarray(arrays.queries), keys, values, arrays.inputs, scale=1.0, sizes=sizes(1, 16), interpret=True
        )

    with pytest.raises(NotImplementedError, match="2147483648 numbers of a pool of float8_e4m3fn"):
        jax.eval_shape(run, pool, pool)
