"""The jnp attention against the naive one, and the shapes-do-not-matter property of its tile loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cases as cases
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.reference_write import write_kv
from jsg.kernels_pallas.tile import QUERY_TILE, SHORT_TILE


def attend(case: cases.Case, arrays: cases.Arrays) -> np.ndarray:
    run = jax.jit(
        lambda q, k, v, i: ops.paged_attention(
            q, (k, v), i, scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap
        )
    )
    return np.asarray(run(arrays.queries, arrays.keys, arrays.values, arrays.inputs))


@pytest.mark.parametrize("singles", [True, False], ids=["singles", "tiles"])
@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_equals_naive_attention(case: cases.Case, singles: bool):
    arrays = cases.make(case, singles=singles)
    out = attend(case, arrays)
    np.testing.assert_allclose(out[: len(arrays.expected)], arrays.expected, atol=2e-6)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda c: c.name)
def test_short_tiles_may_be_computed_apart(case: cases.Case):
    arrays = cases.make(case, singles=False)
    lens = np.asarray(arrays.inputs.tile_lens)[: int(arrays.inputs.num_tiles)]
    leading = int(np.argmax(np.append(lens, QUERY_TILE) > SHORT_TILE))
    short = dataclasses.replace(arrays, inputs=arrays.inputs._replace(num_short_tiles=jnp.int32(leading)))
    np.testing.assert_allclose(attend(case, short)[: len(arrays.expected)], arrays.expected, atol=2e-6)


def test_some_cases_have_short_tiles_before_others():
    lens = [np.asarray(cases.make(case, singles=False).inputs.tile_lens) for case in cases.CASES]
    assert any(each[0] <= SHORT_TILE < each.max() for each in lens)


def test_padding_tokens_give_zero():
    case = cases.CASES[0]
    arrays = cases.make(case)
    assert not attend(case, arrays)[len(arrays.expected) :].any()


def test_garbage_in_unused_pages_is_never_read_into_a_result():
    case = next(c for c in cases.CASES if c.name == "mixed")
    arrays = cases.make(case)
    clean = attend(case, arrays)
    table = np.array(arrays.inputs.page_table)
    (stale,) = set(range(1, len(arrays.keys))) - set(table.flat)
    table[1:] = np.where(table[1:] == 0, stale, table[1:])
    arrays = dataclasses.replace(arrays, inputs=arrays.inputs._replace(page_table=jnp.asarray(table)))
    arrays.keys[stale] = np.nan
    arrays.values[stale] = 1e30  # values are always finite: see `ops.rotate_and_write`
    np.testing.assert_array_equal(attend(case, arrays)[: len(arrays.expected)], clean[: len(arrays.expected)])


def test_what_is_not_finite_reaches_later_tokens_only():
    case = cases.Case("whole", ((0, 90),), padding=0)
    arrays = cases.make(case)
    clean = attend(case, arrays)
    page = np.asarray(arrays.inputs.page_table)[1, 70]
    value = arrays.values[page].copy()
    value[0, 0, 3] = np.nan
    cache = jnp.asarray(arrays.keys), jnp.asarray(arrays.values)
    pools = write_kv(cache, jnp.array([page]), jnp.asarray(arrays.keys[page]), jnp.asarray(value))
    arrays = dataclasses.replace(arrays, keys=np.asarray(pools[0]), values=np.asarray(pools[1]))
    out = attend(case, arrays)
    np.testing.assert_array_equal(out[:70], clean[:70])
    first_head_group = case.heads // case.kv_heads
    assert np.isnan(out[70:, :first_head_group]).all()
    np.testing.assert_array_equal(out[70:, first_head_group:], clean[70:, first_head_group:])


@pytest.mark.parametrize("chunks", [(200,), (1, 199), (7, 64, 129), (64, 64, 64, 8), (1,) * 3 + (197,)])
def test_a_tile_result_is_bitwise_the_same_however_the_prompt_is_cut(chunks: tuple[int, ...]):
    whole = cases.Case("whole", ((0, 200),), padding=0)
    arrays = cases.make(whole)
    expected = attend(whole, arrays)
    done = 0
    for chunk in chunks:
        part = cases.Case("part", ((done, chunk),), padding=5)
        inputs = cases.make(part, singles=False).inputs._replace(page_table=arrays.inputs.page_table)
        queries = np.zeros((chunk + 5, *arrays.queries.shape[1:]), np.float32)
        queries[:chunk] = arrays.queries[done : done + chunk]
        out = attend(part, dataclasses.replace(arrays, queries=queries, inputs=inputs))
        np.testing.assert_array_equal(out[:chunk], expected[done : done + chunk])
        done += chunk


@pytest.mark.parametrize("page_size", [1, 8])
def test_write_kv_writes_each_slot_and_nothing_else(page_size: int):
    keys, values = (jnp.zeros((32 // page_size, page_size, 2, 4)) for _ in range(2))
    slots = jnp.array([3, 17, 30, 0, 0])
    new = jnp.array([1, 2, jnp.inf, jnp.nan, 5])[:, None, None] * jnp.ones((5, 2, 4))
    keys, values = (np.asarray(x).reshape(32, 2, 4) for x in write_kv((keys, values), slots, new + 1, new))
    assert [values[s, 0, 0] for s in (3, 17, 30)] == [1, 2, 0]
    assert [keys[s, 0, 0] for s in (3, 17)] == [2, 3]
    assert np.isnan(keys[30]).all()
    assert set(np.flatnonzero(keys[:, 0, 0])) == {3, 17, 30}
    assert set(np.flatnonzero(values[:, 0, 0])) == {3, 17}
    assert not keys[0].any(), "the dump slot takes zeros whatever a token has"
