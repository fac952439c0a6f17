"""The gated delta rule of published models, compiled for a card of each class: states in place, launches, no spills."""

import functools

import jax
import pytest

from bench.nvidia.compiler import array, compile_for
from jsg.engine.device.cards import CLASSES, NAMES
from jsg.kernels_pallas import delta_tiles
from jsg.kernels_pallas.delta_recurrent import gated_delta
from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, PieceTiles, StateCache
from jsg.kernels_pallas.tile import QUERY_TILE
from tests.nvidia.test_kernels import having

HEADS, DIM, SLOTS = 32, 128, 257
MODELS = {"Qwen3.5-35B-A3B": (16, False), "Kimi-Linear-48B-A3B": (32, True)}
"""Key heads, and whether gates are apart and each number of a key has a decay."""
CARDS = [pytest.param(name, marks=() if name in CLASSES.values() else pytest.mark.long) for name in NAMES]


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 1), (32, 32), (512, 256)], ids=["one-row", "decode", "extend"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", CARDS)
def test_states_are_changed_in_place(name: str, model: str, num_tokens: int, rows: int, nvdisasm):
    """Decode is one launch, which reads and writes each state once. With chunks the last inputs are written later."""
    key_heads, is_apart = MODELS[model]
    gates = HEADS // key_heads * DIM
    mixed = 2 * DIM + gates
    cache = StateCache(array(SLOTS, 4, key_heads, mixed), array(SLOTS, HEADS, DIM, DIM, dtype="float32"))
    rates, biases = (array(HEADS, *own, dtype="float32") for own in ([], [DIM] if is_apart else []))
    taps, norm = array(4, key_heads, mixed), array(DIM, dtype="float32")
    pieces = Pieces(*[array(rows, dtype="int32")] * len(Pieces._fields))

    def layer(joint, raw, taps, rate, bias, norm, cache, pieces, apart):
        weights = DeltaWeights(taps, rate, bias, norm, 1e-6)
        return gated_delta(joint, raw, weights, cache, pieces, apart, has_one_token=num_tokens == rows)

    joint = array(num_tokens, key_heads, mixed + (0 if is_apart else gates))
    raw = array(num_tokens, key_heads, (1 if is_apart else 2) * HEADS // key_heads)
    apart = GatesApart(*[array(num_tokens, key_heads, gates)] * 2) if is_apart else None
    program = compile_for(name, layer, joint, raw, taps, rates, biases, norm, cache, pieces, apart, donate=(6,))
    assert program.aliased_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    inputs_bytes = rows * cache.inputs.size // SLOTS * cache.inputs.dtype.itemsize
    assert program.temporary_bytes <= (0 if num_tokens == rows else inputs_bytes) + 4096, "no state is copied"
    launches = [launch.name for launch in program.launches]
    launches.remove("loop_concatenate_fusion")  # of the pieces, once in a step
    assert launches == ["delta_kernel"] if num_tokens == rows else len(launches) <= 7
    assert having(program.instructions("delta_kernel", nvdisasm), "LDL|STL") == set(), "registers spill"


LAUNCHES_IN_TILES = 9
"""Of a layer: the convolution, gates, the two kernels, the norm, and four that keep the last inputs."""


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", CARDS)
def test_prompts_in_tiles(name: str, dtype: str, nvdisasm):
    """States are read and written once for each piece. What passes through memory is as the kernels' docstrings say."""
    num_tokens, rows, num_tiles, key_heads, gates = 512, 256, 512 // QUERY_TILE + 256, 16, 2 * DIM
    of = functools.partial(array, dtype=dtype)
    mixed, of_tokens = 2 * DIM + gates, (of(num_tokens, 16, 4 * DIM + gates), of(num_tokens, 16, 4))
    taps, numbers, norm = of(4, key_heads, mixed), array(HEADS, dtype="float32"), array(DIM, dtype="float32")
    cache = StateCache(of(SLOTS, 4, key_heads, mixed), array(SLOTS, HEADS, DIM, DIM, dtype="float32"))
    pieces = Pieces(*[array(rows, dtype="int32")] * len(Pieces._fields))
    tiles = PieceTiles(*(array(size, dtype="int32") for size in (num_tiles, num_tiles, rows)))

    def layers(joint, raw, taps, rate, bias, norm, caches, pieces, tiles):
        weights = DeltaWeights(taps, rate, bias, norm, 1e-6)
        return [delta_tiles.gated_delta(joint, raw, weights, cache, pieces, tiles) for cache in caches]

    one, two = (
        compile_for(name, layers, *of_tokens, taps, *[numbers] * 2, norm, [cache] * count, pieces, tiles, donate=(6,))
        for count in (1, 2)
    )
    assert one.aliased_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    assert len(two.launches) - len(one.launches) <= LAUNCHES_IN_TILES
    of_token = key_heads * mixed * 2 + HEADS * (2 * QUERY_TILE * 4 + DIM * 2 + 6 * 4)
    inputs_bytes = rows * cache.inputs.size // SLOTS * 2
    assert one.temporary_bytes <= num_tokens * of_token + inputs_bytes + 2**17, "no state is copied"
    assert one.fits
    for kernel in ("delta_inverse_kernel", "delta_tiles_kernel"):
        counts = one.instructions(kernel, nvdisasm)
        assert having(counts, "LDL|STL") == set(), "registers spill"
        assert having(counts, "HMMA|HGMMA|UTC.*MMA"), "tensor cores multiply"
