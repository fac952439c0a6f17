"""`cascade` in interpret mode against attention by its definition, and against `paged_decode`."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cases as cases
from jsg.kernels_pallas import paged_decode
from jsg.kernels_pallas.attention_block import Attended
from jsg.kernels_pallas.cascade import Sizes, cascade, members_per_program
from jsg.window import Window
from tests.kernels_pallas import definition
from tests.kernels_pallas.definition import named, with_room

REST = paged_decode.Sizes(splits=2, block_k=32, num_warps=4, num_stages=3)
ONE = Sizes(splits=1, block_k=32, num_warps=4, num_stages=3, rest=REST._replace(splits=1))
TWO = Sizes(splits=2, block_k=16, num_warps=4, num_stages=3, rest=REST)
SHARED = [case for case in cases.CASES if case.shared]
attend, check = (functools.partial(function, cascade) for function in (definition.attend, definition.check))


@pytest.mark.parametrize("name", ["shared", "shared-sinks"])
def test_equals_the_definition(name: str):
    check(named(name), TWO)


@pytest.mark.slow
@pytest.mark.parametrize("case", SHARED, ids=lambda case: case.name)
def test_equals_the_definition_in_arrays_without_room(case: cases.Case):
    check(case, TWO, has_room=False)


TYPES = {
    (ONE, "float32", None): "shared",
    (TWO._replace(splits=5), "bfloat16", None): "shared-by-two-tiles",
    (TWO._replace(splits=5), "bfloat16", "float8_e4m3fn"): "shared-pages-of-16",
    (ONE, "bfloat16", "float8_e5m2"): "shared",
}
"""The case of each type that is not long."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "sizes", "dtype", "pool_dtype"),
    [
        pytest.param(
            case,
            *types,
            marks=() if case.name == name else pytest.mark.long,
            id="-".join(map(str, (case.name, *types[1:]))),
        )
        for types, name in TYPES.items()
        for case in SHARED
    ],
)
def test_equals_the_definition_in_every_type(case: cases.Case, sizes: Sizes, dtype: str, pool_dtype: str | None):
    """All but one case of each type are long."""
    check(dataclasses.replace(case, softcap=3.0), sizes, dtype, pool_dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "pool_dtype"),
    [
        ("qwen2.5-7b", "bfloat16", "float8_e4m3fn"),
        *(
            pytest.param(model, "bfloat16", None, marks=() if model in ("phi-2", "gemma-2b") else pytest.mark.long)
            for model in cases.MODELS
        ),
    ],
)
def test_equals_the_definition_with_the_heads_of_real_models(model: str, dtype: str, pool_dtype: str | None):
    """Long but for heads of 80 numbers that share nothing, of 256 that share all keys, and a group of seven."""
    check(cases.for_model(named("shared-pages-of-16"), model), ONE, dtype, pool_dtype, has_room=False)


@pytest.mark.parametrize("group", [2, pytest.param(64, marks=pytest.mark.slow)])
def test_a_tile_whose_query_heads_do_not_fit_in_a_block_has_several_programs(
    group: int, monkeypatch: pytest.MonkeyPatch
):
    """The group has two tiles too."""
    monkeypatch.setattr("jsg.kernels_pallas.cascade.MAX_COLUMN_BYTES", 32 * group)
    assert members_per_program(group, 4, 128) == 8
    cut = ONE._replace(num_stages=2)  # a program of its own: those that are kept were traced with more bytes
    check(dataclasses.replace(named("shared-by-two-tiles"), heads=group, kv_heads=1), cut)


def random_groups(rng: np.random.Generator, num_rows: int, page_size: int) -> cases.Case:
    """Rows of random lengths, some of them dealt out to groups of random prefixes."""
    lens = rng.integers(1, 80, num_rows)
    dealt, shared = list(rng.permutation(num_rows)), []
    while len(dealt) > 2:
        members = [dealt.pop() for _ in range(min(len(dealt), int(rng.integers(2, 6))))]
        most = (lens[members].min() - 1) // page_size * page_size
        if most:
            shared.append((tuple(int(m) for m in members), int(rng.integers(1, most // page_size + 1)) * page_size))
    return cases.Case(
        f"random-{page_size}", tuple((int(n) - 1, 1) for n in lens), page_size=page_size, shared=tuple(shared)
    )


@pytest.mark.parametrize(
    "seed",
    [
        0,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.long]) for seed in range(2, 8)),
    ],
)
def test_equals_the_definition_whatever_the_groups(seed: int):
    """One seed for each size of a page is not long."""
    rng = np.random.default_rng(seed)
    case = random_groups(rng, num_rows=8, page_size=(1, 4)[seed % 2])
    assert case.shared
    check(case, TWO)


def test_the_prefix_is_read_by_the_tile_and_not_by_its_members():
    case = named("shared")
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays, TWO)
    groups, table = arrays.inputs.groups, np.array(arrays.inputs.page_table)
    assert groups is not None
    rows = np.asarray(arrays.inputs.single_rows)[np.asarray(groups.members[0])]
    member = next(row for row in rows if row != groups.rows[0])
    table[member, : int(groups.lens[0])] = 0  # the tile reads the pages of the row that it names, which is another
    arrays = dataclasses.replace(arrays, inputs=arrays.inputs._replace(page_table=jnp.asarray(table)))
    np.testing.assert_array_equal(attend(case, arrays, TWO).out, clean.out)


def test_with_a_window_groups_are_not_heeded(monkeypatch: pytest.MonkeyPatch):
    """The step is `paged_decode`'s, with its options."""
    given = []

    def plain(*batch: Any, **options: Any) -> Attended:
        given.append((batch, options))
        return Attended(batch[0], batch[0][..., 0])

    monkeypatch.setattr(paged_decode, "paged_decode", plain)
    case = dataclasses.replace(named("shared-pages-of-16"), window=Window(40))
    arrays = cases.make(case)
    batch = *map(jnp.asarray, (arrays.queries, arrays.keys, arrays.values)), arrays.inputs
    cascade(*batch, scale=0.5, window=Window(40), softcap=3.0, sizes=TWO, interpret=True)
    [(passed, options)] = given
    assert all(one is other for one, other in zip(passed, batch, strict=True))
    assert options == {
        "scale": 0.5,
        "window": Window(40),
        "softcap": 3.0,
        "sinks": None,
        "sizes": REST,
        "interpret": True,
    }


@pytest.mark.slow
def test_a_window_equals_the_definition():
    check(dataclasses.replace(named("shared-pages-of-16"), window=Window(40)), TWO)


def test_a_key_that_is_not_a_number_reaches_who_sees_it_only():
    case = named("shared")
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays, TWO)
    table = np.asarray(arrays.inputs.page_table)
    arrays.keys[table[1, 20], 0, 0] = np.nan  # in the prefix of rows 0, 1, 2 and 4
    arrays.keys[table[6, 100], 0, 0] = np.nan  # in row 5 alone
    found = attend(case, arrays, TWO)
    is_hit = np.zeros(found.lse.shape, bool)
    is_hit[[0, 1, 2, 4, 5], : case.heads // case.kv_heads] = True
    assert np.isnan(found.out[is_hit]).all()
    np.testing.assert_array_equal(found.out[~is_hit], clean.out[~is_hit])
