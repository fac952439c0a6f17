"""Tiles of linear attention against its definition: repeated tokens, fast and slow decay, and neighbours."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jsg.kernels_pallas import delta_recurrent, delta_tiles, ops, reference_delta
from jsg.kernels_pallas.inputs import Pieces, ScanWeights, StateCache
from jsg.kernels_pallas.reference_delta import tiles_of
from jsg.kernels_pallas.tile import QUERY_TILE
from tests.kernels_pallas.definition import QUICKLY
from tests.kernels_pallas.delta_cases import CASES, EPS, SLOTS, STEPS, Arrays, Case, Run, definition, make

FAST = ("prompts", "bfloat16", "scan in bfloat16", "prompts by channel")
TOLERANCES = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 2e-3}
NAMED = {case.name: case for case in CASES}
IN_FLOAT16 = [
    dataclasses.replace(NAMED[name], name=f"{name} in float16", dtype="float16")
    for name in ("bfloat16", "scan in bfloat16")
]
TOKENS = 512
"""Of all cases below, so that one program is compiled for them."""


def of_one_head(*runs: Run, **form: bool) -> Case:
    return Case("one head", runs, heads=1, group=1, padding=TOKENS - sum(run.length for run in runs), **form)


@functools.partial(jax.jit, compiler_options=QUICKLY | {"xla_allow_excess_precision": False})
def in_tiles(a: Arrays) -> tuple[jax.Array, StateCache]:
    tiles = tiles_of(a.pieces, len(a.joint) // QUERY_TILE + len(a.pieces.lens))
    weights = a.weights._replace(**({"steps": STEPS} if isinstance(a.weights, ScanWeights) else {"eps": EPS}))
    given = a.joint, a.raw_gates, weights, a.cache, a.pieces, tiles, a.apart
    return delta_tiles.gated_delta(*given, interpret=True)


def run(arrays: Arrays) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    out, cache = in_tiles(arrays)
    return tuple(np.asarray(x, np.float32) for x in (out, *cache))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[] if case.name in FAST else [pytest.mark.slow], id=case.name)
        for case in (*CASES, *IN_FLOAT16)
    ],
)
def test_tiles_are_the_definition(case: Case):
    """Pieces of all lengths, some of which continue. Slots that nobody may read hold NaN; only targets change."""
    arrays = make(case)
    found, meant = run(arrays), definition(arrays)
    tolerance = TOLERANCES[case.dtype]
    np.testing.assert_allclose(found[0], meant[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found[2], np.asarray(meant[2]), rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(found[1][1:], meant[1][1:].astype(np.float32))
    targets = [run.target for run in case.runs if run.length]
    untouched = [slot for slot in range(1, SLOTS) if slot not in targets]
    for new, old in zip(found[1:], arrays.cache, strict=True):
        np.testing.assert_array_equal(new[untouched], np.asarray(old, np.float32)[untouched])


@pytest.mark.parametrize("is_apart", [False, True], ids=["by-head", "by-channel"])
@pytest.mark.parametrize("count", [TOKENS, pytest.param(4096, marks=pytest.mark.slow)])
def test_one_token_many_times(count: int, is_apart: bool):
    """Equal keys that are written strongly and hardly fade: products of powers of the matrix would give 1e10."""
    arrays = make(dataclasses.replace(of_one_head(Run(count), Run(0), Run(0), is_apart=is_apart), padding=0))
    arrays = saying(arrays._replace(joint=np.broadcast_to(arrays.joint[:1], arrays.joint.shape)), 4.0, -9.0)
    found, meant = run(arrays), definition(arrays)
    np.testing.assert_allclose(found[0], meant[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[2][1], meant[2][1], rtol=2e-6, atol=2e-6)


def saying(arrays: Arrays, strength: np.ndarray | float, decay: np.ndarray | float) -> Arrays:
    """With these gates before their activation."""
    if arrays.apart is None:
        gates = np.stack(np.broadcast_arrays(strength, decay, arrays.raw_gates[..., 0])[:2], -1)
        return arrays._replace(raw_gates=gates.astype(np.float32))
    apart = arrays.apart._replace(decay=np.broadcast_to(np.float32(decay), arrays.apart.decay.shape))
    return arrays._replace(raw_gates=np.broadcast_to(np.float32(strength), arrays.raw_gates.shape), apart=apart)


@pytest.mark.parametrize("is_apart", [False, True], ids=["by-head", "by-channel"])
def test_slow_decay_beside_fast(is_apart: bool):
    """From 0.001 to 50 in one tile. Sums of decay from the first token on would be wrong by 1e-4.

    Of a decay for each number of a key, a quotient of two exponentials would overflow.
    """
    arrays = make(of_one_head(Run(200, 1, 2, 3), Run(0), Run(0), is_apart=is_apart))
    says = arrays.raw_gates[..., 1:] if arrays.apart is None else arrays.apart.decay
    says = np.exp(np.random.default_rng(0).uniform(np.log(1e-3), np.log(50), says.shape))
    says += np.log(-np.expm1(-says))  # softplus gives it back
    weights = arrays.weights._replace(decay_rate=jnp.zeros(1), decay_bias=jnp.zeros_like(arrays.weights.decay_bias))
    arrays = saying(arrays._replace(weights=weights), 1.0, says if is_apart else says[..., 0])
    found, meant = run(arrays), definition(arrays)
    np.testing.assert_allclose(found[0], meant[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[2][2], meant[2][2], rtol=3e-6, atol=3e-6)


def test_numbers_of_a_model_in_bfloat16_are_multiplied_in_two_parts(monkeypatch: pytest.MonkeyPatch):
    """Of queries, keys and values in bfloat16 states are right to a few of 2 ** -17, whatever decays."""
    arrays = make(of_one_head(Run(TOKENS), Run(0), Run(0), is_apart=True))
    monkeypatch.setitem(delta_tiles.NUM_PARTS, "float32", 1)
    found = np.asarray(jax.jit(lambda a: in_tiles.__wrapped__(a)[1].states[1], compiler_options=QUICKLY)(arrays))
    convolved = reference_delta.convolved
    monkeypatch.setattr(
        reference_delta, "convolved", lambda *given: jax.lax.reduce_precision(convolved(*given), 8, mantissa_bits=7)
    )
    weights = arrays.weights._replace(eps=EPS)
    of_reference = lambda a: reference_delta.gated_delta(*a[:2], weights, *a[3:])[1].states[1]  # noqa: E731
    meant = np.asarray(jax.jit(of_reference, compiler_options=QUICKLY)(arrays))
    error = np.sqrt(np.mean(np.square(found - meant)) / np.mean(np.square(meant)))
    assert 1e-7 < error < 2e-5


@pytest.mark.parametrize("is_apart", [False, True], ids=["by-head", "by-channel"])
def test_nothing_of_a_neighbour_is_multiplied(is_apart: bool):
    """Tokens before and behind a request, and tokens in no piece, are NaN. Its own bits are as beside finite ones."""
    arrays = make(of_one_head(Run(3, 3, 3, 9), Run(70, 1, 2, 5), Run(435, 4, 4, 1), is_apart=is_apart))
    own = np.zeros(len(arrays.joint), bool)
    own[3:73] = True
    joint = np.where(own[:, None, None], arrays.joint, np.float32(np.nan))
    alone, beside = run(arrays), run(arrays._replace(joint=joint))
    np.testing.assert_array_equal(beside[0][own], alone[0][own])
    np.testing.assert_array_equal(beside[2][2], alone[2][2])
    np.testing.assert_array_equal(beside[0][-4:], 0)


def test_pieces_are_cut_into_tiles():
    starts, lens = jnp.asarray([0, 130, 131, 0]), jnp.asarray([130, 1, 64, 0])
    tiles = tiles_of(Pieces(starts, lens, *[lens] * 4), 7)
    assert np.asarray(tiles.starts)[:5].tolist() == [0, 64, 128, 130, 131]
    assert np.asarray(tiles.lens).tolist() == [64, 64, 2, 1, 64, 0, 0]
    assert np.asarray(tiles.firsts)[:3].tolist() == [0, 3, 4]


FORMS = {"by head": {}, "by channel": {"is_apart": True}, "scan": {"has_delta": False}}


@pytest.mark.parametrize(
    ("dtype", "form", "sizes", "has_tiles", "chosen"),
    [
        ("bfloat16", "by head", {}, True, "tiles"),
        ("bfloat16", "by head", {}, False, "recurrent"),
        ("bfloat16", "by channel", {}, True, "tiles"),
        ("bfloat16", "scan", {"keys": 256, "values": 80}, True, "tiles"),
        ("bfloat16", "by head", {"keys": 256}, True, "recurrent"),
        ("float16", "by channel", {}, True, "tiles"),
        ("float32", "by head", {}, True, "recurrent"),
    ],
)
def test_which_kernels_are_chosen(
    dtype: str, form: str, sizes: dict[str, int], has_tiles: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
):
    """Those of tiles where they spill no registers."""
    arrays = make(Case("form", (Run(70), Run(0)), dtype=dtype, **sizes, **FORMS[form]))
    tiles = tiles_of(arrays.pieces, 3) if has_tiles else None
    for module, name in ((delta_tiles, "tiles"), (delta_recurrent, "recurrent")):
        monkeypatch.setattr(module, "gated_delta", lambda *_, name=name, **__: (name, arrays.cache))
    name, _ = inspect.unwrap(ops.gated_delta)(*arrays[:5], apart=arrays.apart, tiles=tiles, implementation="triton")
    assert name == chosen
