"""The gated delta rule of every implementation against its definition."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import Pieces, ScanWeights, StateCache
from jsg.kernels_pallas.native import library
from tests.kernels_pallas.definition import QUICKLY
from tests.kernels_pallas.delta_cases import CASES, EPS, SLOTS, STEPS, Arrays, Case, Run, definition, make

IMPLEMENTATIONS = ("reference", "native", "triton")
FAST = ("rows", "known", "rows by channel", "scanned rows")
"""Of a kernel in interpret mode."""
DOUBLES = ("known by channel", "wide by channel", "scan of known", "scan in bfloat16")
"""Of these the pieces, the sizes, the type and the kind of layer are each in another case."""
SOME_SLOW = ("reference", "native", pytest.param("triton", marks=pytest.mark.slow))
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2}


@functools.cache
def compiled(implementation: str, has_one_token: bool = False, is_quick: bool = True):
    def call(a: Arrays) -> tuple[jax.Array, StateCache]:
        own = {"steps": STEPS} if isinstance(a.weights, ScanWeights) else {"eps": EPS}
        weights = a.weights._replace(**own)
        how = {"apart": a.apart, "has_one_token": has_one_token, "implementation": implementation}
        return ops.gated_delta(a.joint, a.raw_gates, weights, a.cache, a.pieces, **how)

    return jax.jit(call, compiler_options=QUICKLY if is_quick else None)


def run(implementation: str, arrays: Arrays, **how: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    out, cache = compiled(implementation, len(arrays.joint) == len(arrays.pieces.lens), **how)(arrays)
    return tuple(np.asarray(x, np.float32) for x in (out, *cache))


def targets(case: Case) -> list[int]:
    return [run.target for run in case.runs if run.length]


@pytest.mark.parametrize(
    ("case", "implementation"),
    [
        pytest.param(case, name, marks=[] if is_fast else [pytest.mark.slow])
        for case in CASES
        for name in IMPLEMENTATIONS
        for is_fast in [case.name in FAST if name == "triton" else case.name not in DOUBLES]
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_it_is_its_definition(case: Case, implementation: str):
    """Slots that nobody may read hold NaN, and no slot but the targets changes."""
    arrays = make(case)
    found, meant = run(implementation, arrays), definition(arrays)
    tolerance = TOLERANCES[case.dtype]
    np.testing.assert_allclose(found[0], meant[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found[2][1:], meant[2][1:], rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(found[1][1:], meant[1][1:].astype(np.float32))
    untouched = [slot for slot in range(1, SLOTS) if slot not in targets(case)]
    for new, old in zip(found[1:], arrays.cache, strict=True):
        np.testing.assert_array_equal(new[untouched], np.asarray(old, np.float32)[untouched])


@pytest.mark.parametrize("implementation", SOME_SLOW)
def test_a_sequence_has_the_same_bits_however_it_is_cut_and_beside_others(implementation: str):
    """In one shape, as with `--deterministic`. The slot of a state does not matter either."""
    whole = make(Case("cuts", (Run(60), Run(0), Run(0)), padding=4))
    meant = run(implementation, whole)
    for cuts in ((20, 20, 20), (1, 2, 3, 54), (1,) * 60):
        cache, done, outs = whole.cache, 0, []
        for number, length in enumerate(cuts):
            places = ([0, 4], [length, 3], [1 + number % 2, 5], [2 - number % 2, 6], [done, 0])
            order = [1, 0] if number % 3 else [0, 1]  # the other request before it, or behind it
            lens = [places[1][i] for i in order]
            starts = np.cumsum(lens) - lens
            columns = [starts, lens, *([column[i] for i in order] for column in places[2:]), [0, 0]]
            pieces = Pieces(*(np.array([*column, 0], np.int32) for column in columns))
            start = int(starts[order.index(0)])
            moved = [np.zeros(x.shape, x.dtype) for x in (whole.joint, whole.raw_gates)]
            for new, x in zip(moved, (whole.joint, whole.raw_gates), strict=True):
                new[start : start + length] = np.asarray(x)[done : done + length]
            out, cache = compiled(implementation)(
                whole._replace(joint=moved[0], raw_gates=moved[1], cache=cache, pieces=pieces)
            )
            outs.append(np.asarray(out)[start : start + length])
            done += length
        np.testing.assert_array_equal(np.concatenate(outs), meant[0][:60])
        last = 2 - (len(cuts) - 1) % 2
        for new, old in zip(cache, meant[1:], strict=True):
            np.testing.assert_array_equal(np.asarray(new)[last], old[1])


@pytest.mark.parametrize("implementation", SOME_SLOW)
def test_one_token_4096_times(implementation: str):
    """Equal keys are the worst case for products of (I + A)^-1, which random tokens do not show."""
    arrays = make(Case("alike", (Run(4096),), heads=1, group=1, keys=16, values=16, padding=0))
    alike = arrays._replace(
        joint=np.broadcast_to(arrays.joint[:1], arrays.joint.shape),
        raw_gates=np.broadcast_to(np.float32([4.0, -9.0]), arrays.raw_gates.shape),  # hardly any decay
    )
    found = run(implementation, alike, is_quick=False)  # as it is compiled where it serves
    for x, meant in zip(found[::2], definition(alike)[::2], strict=True):
        live = x if len(x) == 4096 else x[1:2]
        np.testing.assert_allclose(live, meant if len(x) == 4096 else meant[1:2], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_long", [True, False])
def test_registers_of_both_lengths(is_long: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(library, "has_long_registers", lambda: is_long)
    case = dataclasses.replace(CASES[0], group=1)
    arrays = make(case)
    compiled.cache_clear()
    found, meant = run("native", arrays), definition(arrays)
    compiled.cache_clear()
    np.testing.assert_allclose(found[0], meant[0], rtol=2e-5, atol=2e-5)


def test_what_no_vector_fills_is_for_the_reference():
    arrays = make(Case("narrow", (Run(2),), keys=8))
    with pytest.raises(NotImplementedError, match="multiple of 16"):
        ops.gated_delta(*arrays[:5], implementation="native")
