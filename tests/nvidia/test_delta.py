"""The gated delta rule of Qwen3.5-35B-A3B, compiled for a card of each class: states in place, launches, no spills."""

import jax
import pytest

from bench.nvidia.compiler import array, compile_for
from jsg.engine.device.cards import CLASSES, NAMES
from jsg.kernels_pallas.delta_recurrent import gated_delta
from jsg.kernels_pallas.inputs import DeltaWeights, Pieces, StateCache
from tests.nvidia.test_kernels import having

KEY_HEADS, HEADS, DIM, SLOTS = 16, 32, 128, 257
MIXED = 2 * DIM + HEADS // KEY_HEADS * DIM
CARDS = [pytest.param(name, marks=() if name in CLASSES.values() else pytest.mark.long) for name in NAMES]


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 1), (32, 32), (512, 256)], ids=["one-row", "decode", "extend"])
@pytest.mark.parametrize("name", CARDS)
def test_states_are_changed_in_place(name: str, num_tokens: int, rows: int, nvdisasm):
    """Decode is one launch, which reads and writes each state once. With chunks the last inputs are written later."""
    cache = StateCache(array(SLOTS, 4, KEY_HEADS, MIXED), array(SLOTS, HEADS, DIM, DIM, dtype="float32"))
    numbers = array(HEADS, dtype="float32")
    taps, norm = array(4, KEY_HEADS, MIXED), array(DIM, dtype="float32")
    pieces = Pieces(*[array(rows, dtype="int32")] * len(Pieces._fields))

    def layer(joint, raw, taps, rate, bias, norm, cache, pieces):
        weights = DeltaWeights(taps, rate, bias, norm, 1e-6)
        return gated_delta(joint, raw, weights, cache, pieces, has_one_token=num_tokens == rows)

    joint = array(num_tokens, KEY_HEADS, MIXED + HEADS // KEY_HEADS * DIM)
    raw = array(num_tokens, KEY_HEADS, 2 * HEADS // KEY_HEADS)
    program = compile_for(name, layer, joint, raw, taps, numbers, numbers, norm, cache, pieces, donate=(6,))
    assert program.aliased_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    inputs_bytes = rows * cache.inputs.size // SLOTS * cache.inputs.dtype.itemsize
    assert program.temporary_bytes <= (0 if num_tokens == rows else inputs_bytes) + 4096, "no state is copied"
    launches = [launch.name for launch in program.launches]
    assert launches == ["delta_kernel"] if num_tokens == rows else len(launches) <= 7
    assert having(program.instructions("delta_kernel", nvdisasm), "LDL|STL") == set(), "registers spill"
