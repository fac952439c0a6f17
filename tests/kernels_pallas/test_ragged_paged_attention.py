"""The kernel of extend steps, in interpret mode, against attention by its definition."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cases as cases
from bench.attention_cases import CASES, Case
from jsg.kernels_pallas import ragged_paged_attention as kernel
from jsg.kernels_pallas.ragged_paged_attention import Sizes
from jsg.kernels_pallas.tile import QUERY_TILE
from jsg.window import Window
from tests.kernels_pallas import definition
from tests.kernels_pallas.definition import QUICKLY, with_garbage, with_room

SMALL = Sizes(block_m=32, block_k=32, num_warps=4, num_stages=3)
NAMED = {case.name: case for case in CASES}
FP8 = ("float8_e4m3fn", "float8_e5m2")
attend = functools.partial(definition.attend, kernel.ragged_paged_attention)


@dataclasses.dataclass(frozen=True)
class Variant:
    """A case of the table in some dtype."""

    case: Case
    dtype: str = "float32"
    pool: str | None = None
    singles: bool = True

    @property
    def name(self) -> str:
        parts = (self.case.name, self.dtype, self.pool, None if self.singles else "tiles", self.case.page_size)
        return "-".join(str(part) for part in parts if part)


SHORT = Case("short", ((9, 1), (20, 1), (3, 9), (0, 2)))
FAST = (
    Variant(NAMED["mixed"]),
    Variant(NAMED["mixed"], singles=False),
    Variant(NAMED["window"]),
    Variant(NAMED["aligned-window"]),
    Variant(NAMED["sinks"]),
    Variant(
        dataclasses.replace(SHORT, heads=7, kv_heads=1, head_dim=80, page_size=16, softcap=5.0), "bfloat16", FP8[0]
    ),
)
STEPS = [case for case in CASES if case.name.startswith("decode-")]


def in_pages(size: int) -> Variant:
    return Variant(dataclasses.replace(SHORT, page_size=size), "bfloat16")


def with_head_dim(head_dim: int) -> Variant:
    return Variant(dataclasses.replace(SHORT, head_dim=head_dim), "bfloat16", FP8[1])


SLOW = (
    *(Variant(case) for case in CASES if case not in STEPS),
    *(Variant(NAMED[name], singles=False) for name in ("decode", "extend", "pages-of-16")),
    *(
        Variant(cases.for_model(SHORT, model), "bfloat16")
        for model in ("qwen2.5-7b", "phi-2", "gemma-2b", "gemma-4-31b")
    ),
    *map(in_pages, (1, 24, 128)),
    with_head_dim(96),
    Variant(NAMED["window"], "bfloat16", FP8[1]),
    Variant(NAMED["softcap"], "bfloat16", FP8[0]),
)
LONG = (
    *map(Variant, STEPS),
    Variant(NAMED["window"], singles=False),
    *(Variant(cases.for_model(SHORT, model), "bfloat16") for model in ("llama-3-8b", "llama-3.2-1b", "phi-3-mini")),
    *map(in_pages, (2, 4, 8, 32, 64)),
    *map(with_head_dim, (80, 256)),
    Variant(NAMED["window"], "bfloat16", FP8[0]),
)
"""They differ in one number from a slow one; the kernel of `paged_decode` runs steps of decoding."""


def check(variant: Variant, sizes: Sizes | None = SMALL, *, has_room: bool) -> None:
    definition.check(
        kernel.ragged_paged_attention,
        variant.case,
        sizes,
        variant.dtype,
        variant.pool,
        singles=variant.singles,
        has_room=has_room,
    )


@pytest.mark.parametrize("variant", FAST, ids=lambda v: v.name)
def test_equals_attention_by_definition(variant: Variant):
    check(variant, has_room=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", [*SLOW, *(pytest.param(each, marks=pytest.mark.long) for each in LONG)], ids=lambda v: v.name
)
def test_equals_attention_by_definition_for_the_whole_table(variant: Variant):
    check(variant, has_room=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixed", pytest.param("extend", marks=pytest.mark.long)])
@pytest.mark.parametrize("sizes", [None, Sizes(16, 16, 4, 2), Sizes(256, 128, 8, 2)])
def test_the_sizes_change_nothing(name: str, sizes: Sizes | None):
    """Chunks alone are long: mixed steps have them too."""
    check(Variant(NAMED[name]), sizes, has_room=True)


def test_a_query_is_the_same_to_the_last_bit_however_the_prompt_is_cut():
    whole = Case("whole", ((0, 90),), padding=0, window=Window(32))
    small = cases.make(whole)
    expected = attend(whole, with_room(small), SMALL)
    done = 0
    for chunk in (7, 1, 64, 18):
        part = dataclasses.replace(whole, rows=((done, chunk),), padding=90 - chunk)
        inputs = cases.make(part, singles=False).inputs._replace(page_table=small.inputs.page_table)
        queries = np.zeros_like(small.queries)
        queries[:chunk] = small.queries[done : done + chunk]
        found = attend(whole, with_room(dataclasses.replace(small, queries=queries, inputs=inputs)), SMALL)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one[:chunk], other[done : done + chunk])
        done += chunk


def test_garbage_in_unused_pages_is_never_read_into_a_result():
    arrays = with_room(cases.make(SHORT))
    clean = attend(SHORT, arrays, SMALL)
    arrays = with_garbage(arrays, key=np.nan, value=1e30)  # values are always finite: see `ops.rotate_and_write`
    np.testing.assert_array_equal(attend(SHORT, arrays, SMALL).out, clean.out)


def test_a_key_that_is_nan_reaches_those_who_see_it_and_no_other():
    case = Case("whole", ((0, 40), (0, 5)), padding=0)
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays, SMALL).out
    page = np.asarray(arrays.inputs.page_table)[1, 21]
    arrays.keys[page, 0, 0] = np.nan
    found = attend(case, arrays, SMALL).out
    sees = np.zeros(found.shape, bool)
    sees[21:40, : case.heads // case.kv_heads] = True
    assert np.isnan(found[sees]).all()
    np.testing.assert_array_equal(found[~sees], clean[~sees])


list_items = jax.jit(kernel.list_items, static_argnums=(1, 2), compiler_options=QUICKLY)


@pytest.mark.parametrize("block_q", [1, 16, QUERY_TILE])
@pytest.mark.parametrize("case", [NAMED["mixed"], NAMED["decode"], NAMED["nothing"]], ids=lambda c: c.name)
def test_items_are_every_token_once_and_end_with_the_shortest_part_of_a_prompt(case: Case, block_q: int):
    arrays = with_room(cases.make(case))
    inputs = arrays.inputs
    is_tile = np.arange(len(inputs.tile_lens)) < inputs.num_tiles
    inputs = inputs._replace(tile_lens=jnp.where(is_tile, inputs.tile_lens, 7))  # what lies behind them means nothing
    items = jax.device_get(list_items(inputs, block_q, len(arrays.queries)))
    found = [
        (row, start + i, position + i)
        for row, start, length, position in zip(*items[:4], strict=True)
        for i in range(length)
    ]
    packed = [(row, old + i) for row, (old, new) in enumerate(case.rows, start=1) for i in range(new)]
    assert sorted(found) == sorted((row, token, position) for token, (row, position) in enumerate(packed))
    assert items.lens.max(initial=0) <= block_q
    assert items.num_singles == sum(new == 1 for _, new in case.rows)
    assert items.num_tokens == len(packed)
    parts = [item for item in zip(*items[:4], strict=True) if item[2]][items.num_singles[0] :]
    assert parts == sorted(parts, key=lambda part: -part[1])


@pytest.mark.parametrize("head_dim", [72, 528])
def test_what_it_cannot_do_is_said_to_be_so(head_dim: int):
    case = dataclasses.replace(SHORT, head_dim=head_dim)
    with pytest.raises(NotImplementedError, match="head_dim"):
        attend(case, cases.make(case), SMALL)
