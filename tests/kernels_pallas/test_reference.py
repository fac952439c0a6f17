"""The two attentions of a CPU, in `jnp` and in machine code, against the naive one. Neither depends on shapes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import attention_cases as cases
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import AttentionInputs
from jsg.kernels_pallas.native import amx, library
from jsg.kernels_pallas.reference_write import write_kv
from jsg.kernels_pallas.tile import QUERY_TILE, SHORT_TILE
from tests.kernels_pallas.definition import QUICKLY, named, with_garbage, with_room

PLAIN = ("decode", "decode-without-padding", "prefill-below-a-tile", "prefill-many-tiles", "extend", "mixed", "nothing")
CAPPED = dataclasses.replace(named("pages-of-16"), name="softcap-8-kv-heads", softcap=5.0, heads=16, kv_heads=8)
WINDOW = [
    dataclasses.replace(CAPPED, name=f"{case.name}-softcap-8-kv-heads", rows=case.rows, window=case.window)
    for case in map(named, ("decode-window", "window"))
]
FAST = (*map(named, PLAIN), *WINDOW, named("sinks"), named("aligned-window"))
"""Four programs: without anything special; with a window, pages, clusters of heads and a softcap; with sinks; with a
window that is aligned."""
BOTH = pytest.mark.parametrize("implementation", ["reference", "native"])


@functools.cache
def compiled(as_served: bool, implementation: str, **static: float | None) -> Callable[..., jax.Array]:
    def run(queries: jax.Array, keys: jax.Array, values: jax.Array, inputs: Any, sinks: Any) -> jax.Array:
        how = {**static, "sinks": sinks, "implementation": implementation}
        return ops.paged_attention(queries, (keys, values), inputs, **how)

    return jax.jit(run, compiler_options=None if as_served else QUICKLY)


def attend(
    case: cases.Case, arrays: cases.Arrays, implementation: str = "reference", *, as_served: bool = False
) -> np.ndarray:
    """The attention, as an engine compiles it or quickly; the last bits of the reference may differ."""
    run = compiled(as_served, implementation, scale=case.head_dim**-0.5, window=case.window, softcap=case.softcap)
    return np.asarray(run(arrays.queries, arrays.keys, arrays.values, arrays.inputs, arrays.sinks))


def short_tiles_apart(inputs: AttentionInputs) -> AttentionInputs:
    """The tiles that come before the first that is not short may be computed apart."""
    lens = np.asarray(inputs.tile_lens)[: int(inputs.num_tiles)]
    leading = int(np.argmax(np.append(lens, QUERY_TILE) > SHORT_TILE))
    return inputs._replace(num_short_tiles=jnp.int32(leading))


def marks_of(case: cases.Case, how: str) -> list[pytest.MarkDecorator]:
    if case in FAST:
        return []
    return [pytest.mark.slow, *([pytest.mark.long] if case.name.startswith("decode-") and how != "singles" else [])]


@pytest.mark.parametrize(
    ("case", "how"),
    [
        pytest.param(case, how, marks=marks_of(case, how), id=f"{case.name}-{how}")
        for case in (*FAST, *(case for case in cases.CASES if case not in FAST))
        for how in ("singles", "tiles", "short-tiles-apart")
    ],
)
def test_equals_naive_attention(case: cases.Case, how: str):
    """Steps of decoding as if they were prompts are long, but for the fast ones."""
    arrays = with_room(cases.make(case, singles=how == "singles"))
    if how == "short-tiles-apart":
        arrays = dataclasses.replace(arrays, inputs=short_tiles_apart(arrays.inputs))
    out, num_real = attend(case, arrays), len(arrays.expected)
    np.testing.assert_allclose(out[:num_real], arrays.expected, atol=2e-6)
    assert not out[num_real:].any(), "padding tokens give zero"


@pytest.mark.slow
@pytest.mark.parametrize("case", [named("mixed"), named("shared"), named("nothing")], ids=lambda c: c.name)
def test_equals_naive_attention_in_arrays_without_room(case: cases.Case):
    arrays = cases.make(case)
    np.testing.assert_allclose(attend(case, arrays)[: len(arrays.expected)], arrays.expected, atol=2e-6)


def test_some_cases_have_short_tiles_before_others():
    lens = [np.asarray(cases.make(case, singles=False).inputs.tile_lens) for case in FAST]
    assert any(each[0] <= SHORT_TILE < each.max() for each in lens)


@pytest.mark.parametrize("singles", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        *cases.CASES,
        CAPPED,
        *(cases.for_model(named("mixed"), model) for model in ("phi-2", "gemma-2b")),
    ],
    ids=lambda case: case.name,
)
def test_machine_code_equals_naive_attention(case: cases.Case, singles: bool):
    arrays = with_room(cases.make(case, singles=singles))
    out, num_real = attend(case, arrays, "native"), len(arrays.expected)
    np.testing.assert_allclose(out[:num_real], arrays.expected, atol=4e-6)
    assert not out[num_real:].any(), "padding tokens give zero"


def test_machine_code_for_short_registers_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch):
    case = named("mixed")
    arrays = cases.make(case)
    long = attend(case, arrays, "native")
    monkeypatch.setattr(library, "has_long_registers", lambda: False)
    compiled.cache_clear()
    np.testing.assert_array_equal(attend(case, arrays, "native"), long)
    compiled.cache_clear()


IN_BFLOAT16 = (
    named("sinks"),
    named("pages-of-16"),
    CAPPED,
    *(cases.for_model(named("mixed"), model) for model in ("phi-2", "llama-3-8b")),
)


def slow_unless_third(number: int, *others: int) -> tuple[pytest.MarkDecorator, ...]:
    """A third of the dear cases is fast, in which there is each unit, each type of pool and each case."""
    return (pytest.mark.slow,) if number < 3 and (number + sum(others)) % 3 else ()


@pytest.mark.parametrize(
    ("case", "unit", "pool_dtype"),
    [
        pytest.param(case, unit, pool, marks=slow_unless_third(i, j, k), id=f"{case.name}-{unit}-{pool}")
        for i, case in enumerate(IN_BFLOAT16)
        for j, unit in enumerate(("matrix unit", "pairs", "neither"))
        for k, pool in enumerate(("bfloat16", "float32"))
    ],
)
def test_machine_code_computes_in_bfloat16(
    case: cases.Case, unit: str, pool_dtype: str, monkeypatch: pytest.MonkeyPatch
):
    """The matrix unit and the instruction for pairs take heads of a multiple of 32 and pools in bfloat16."""
    if unit == "matrix unit" and not amx.is_available():
        pytest.skip("this processor has no matrix unit, or the system does not let us use it")
    if unit == "pairs" and not library.multiplies_pairs():
        pytest.skip("this processor does not multiply pairs of bfloat16")
    monkeypatch.setattr(amx, "is_available", lambda: unit == "matrix unit")
    monkeypatch.setattr(library, "multiplies_pairs", lambda: unit == "pairs")
    compiled.cache_clear()
    arrays = with_room(cases.make(case, dtype="bfloat16", pool_dtype=pool_dtype))
    out = attend(case, arrays, "native").astype(np.float32)
    np.testing.assert_allclose(out[: len(arrays.expected)], arrays.expected, atol=2e-2)
    assert not out[len(arrays.expected) :].any(), "padding tokens give zero"
    compiled.cache_clear()


def test_machine_code_names_what_it_cannot_do():
    odd = dataclasses.replace(named("decode"), head_dim=24)
    wide = dataclasses.replace(named("decode"), head_dim=592)
    for case in (odd, wide):
        with pytest.raises(NotImplementedError, match="multiple of 16 up to 576 numbers"):
            attend(case, cases.make(case), "native")
    eight_bits = cases.make(named("decode"), pool_dtype="float8_e4m3fn")
    with pytest.raises(NotImplementedError, match="reads float32 and bfloat16"):
        attend(named("decode"), eight_bits, "native")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_machine_code_gives_a_token_the_same_bits_alone_and_in_a_tile(dtype: str):
    """So what is decoded equals what is computed again as a prompt."""
    case = cases.Case("tail", ((120, 30),), padding=0, head_dim=32)
    make = functools.partial(cases.make, dtype=dtype, pool_dtype=dtype)
    tile = attend(case, make(case), "native")
    for index in (0, 17, 29):
        alone = cases.Case("alone", ((120 + index, 1),), padding=0, head_dim=32)
        arrays = make(case)
        inputs = cases.make(alone).inputs._replace(page_table=arrays.inputs.page_table)
        single = dataclasses.replace(arrays, queries=arrays.queries[index : index + 1], inputs=inputs)
        np.testing.assert_array_equal(attend(alone, single, "native")[0], tile[index])


@BOTH
def test_garbage_in_unused_pages_is_never_read_into_a_result(implementation: str):
    case = named("mixed")
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays, implementation)
    arrays = with_garbage(arrays, key=np.nan, value=1e30)  # values are always finite: see `ops.rotate_and_write`
    np.testing.assert_array_equal(
        attend(case, arrays, implementation)[: len(arrays.expected)], clean[: len(arrays.expected)]
    )


@BOTH
def test_what_is_not_finite_reaches_later_tokens_only(implementation: str):
    case = cases.Case("whole", ((0, 90),), padding=0)
    arrays = with_room(cases.make(case))
    clean = attend(case, arrays, implementation)
    page = np.asarray(arrays.inputs.page_table)[1, 70]
    value = arrays.values[page].copy()
    value[0, 0, 3] = np.nan
    cache = jnp.asarray(arrays.keys), jnp.asarray(arrays.values)
    pools = write_kv(cache, jnp.array([page]), jnp.asarray(arrays.keys[page]), jnp.asarray(value))
    arrays = dataclasses.replace(arrays, keys=np.asarray(pools[0]), values=np.asarray(pools[1]))
    out = attend(case, arrays, implementation)
    np.testing.assert_array_equal(out[:70], clean[:70])
    first_head_group = case.heads // case.kv_heads
    assert np.isnan(out[70:90, :first_head_group]).all()
    np.testing.assert_array_equal(out[70:90, first_head_group:], clean[70:90, first_head_group:])


@BOTH
@pytest.mark.parametrize(
    ("chunks", "has_room"),
    [
        *((chunks, True) for chunks in ((200,), (1, 199), (7, 64, 129), (64, 64, 64, 8), (1,) * 3 + (197,))),
        pytest.param((7, 64, 129), False, marks=pytest.mark.slow),
    ],
)
def test_a_tile_result_is_bitwise_the_same_however_the_prompt_is_cut(
    chunks: tuple[int, ...], has_room: bool, implementation: str
):
    """Without room each chunk runs in a program of its own."""
    fit = with_room if has_room else lambda arrays: arrays
    whole = cases.Case("whole", ((0, 200),), padding=0)
    arrays = cases.make(whole)
    expected = attend(whole, fit(arrays), implementation, as_served=True)
    done = 0
    for chunk in chunks:
        part = cases.Case("part", ((done, chunk),), padding=5)
        inputs = cases.make(part, singles=False).inputs._replace(page_table=arrays.inputs.page_table)
        queries = np.zeros((chunk + 5, *arrays.queries.shape[1:]), np.float32)
        queries[:chunk] = arrays.queries[done : done + chunk]
        some = fit(dataclasses.replace(arrays, queries=queries, inputs=inputs))
        out = attend(part, some, implementation, as_served=True)
        np.testing.assert_array_equal(out[:chunk], expected[done : done + chunk])
        done += chunk


@pytest.mark.parametrize("page_size", [1, 8])
def test_write_kv_writes_each_slot_and_nothing_else(page_size: int):
    keys, values = (jnp.zeros((32 // page_size, page_size, 2, 4)) for _ in range(2))
    slots = np.array([3, 17, 30, 0, 0])
    new = np.array([1, 2, np.inf, np.nan, 5], np.float32)[:, None, None] * np.ones((5, 2, 4), np.float32)
    write = jax.jit(write_kv, compiler_options=QUICKLY)
    keys, values = (np.asarray(x).reshape(32, 2, 4) for x in write((keys, values), slots, new + 1, new))
    assert [values[s, 0, 0] for s in (3, 17, 30)] == [1, 2, 0]
    assert [keys[s, 0, 0] for s in (3, 17)] == [2, 3]
    assert np.isnan(keys[30]).all()
    assert set(np.flatnonzero(keys[:, 0, 0])) == {3, 17, 30}
    assert set(np.flatnonzero(values[:, 0, 0])) == {3, 17}
    assert not keys[0].any(), "the dump slot takes zeros whatever a token has"
