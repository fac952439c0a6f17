"""The gated delta rule of published models, compiled for a card of each class: states in place, launches, no spills."""

import jax
import pytest

from bench.nvidia.compiler import array, compile_for
from jsg.engine.device.cards import CLASSES, NAMES
from jsg.kernels_pallas.delta_recurrent import gated_delta
from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, Pieces, StateCache
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
    assert launches == ["delta_kernel"] if num_tokens == rows else len(launches) <= 7
    assert having(program.instructions("delta_kernel", nvdisasm), "LDL|STL") == set(), "registers spill"
