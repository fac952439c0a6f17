"""The selective scan of Granite 4 and Nemotron-H, compiled for a card of each class: in place, launches, no spills."""

import jax
import pytest

from bench.nvidia.compiler import array, compile_for
from jsg.kernels_pallas.delta_recurrent import gated_delta
from jsg.kernels_pallas.inputs import Pieces, ScanWeights, StateCache
from tests.nvidia.test_delta import CARDS
from tests.nvidia.test_kernels import having

SLOTS = 65
SHAPES = {"granite": (1, 48, 64, 128), "nemotron": (8, 128, 80, 128), "wide": (8, 256, 64, 256)}
"""Groups, heads, and the widths of a value and of a key: Granite 4 tiny, Nemotron Nano 9B v2, Nemotron-H 56B."""
STEPS = [pytest.param(32, 32, id="decode"), pytest.param(512, 64, id="extend")]


@pytest.mark.parametrize(("num_tokens", "rows"), STEPS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CARDS)
def test_states_are_changed_in_place(name: str, shape: str, num_tokens: int, rows: int, nvdisasm):
    """Decode is one launch. With chunks the last inputs of the convolution are written later."""
    groups, heads, values, keys = SHAPES[shape]
    mixed = 2 * keys + heads // groups * values
    cache = StateCache(array(SLOTS, 4, groups, mixed), array(SLOTS, heads, values, keys, dtype="float32"))
    numbers = array(heads, dtype="float32")
    pieces = Pieces(*[array(rows, dtype="int32")] * len(Pieces._fields))

    def layer(joint, raw, taps, rate, bias, skip, bias_of_taps, cache, pieces):
        weights = ScanWeights(taps, rate, bias, skip, bias_of_taps, (0.001, float("inf")))
        return gated_delta(joint, raw, weights, cache, pieces, has_one_token=num_tokens == rows)

    joint = array(num_tokens, groups, mixed + heads // groups * values)
    given = (joint, array(num_tokens, groups, heads // groups), array(4, groups, mixed), *[numbers] * 3)
    program = compile_for(name, layer, *given, array(groups, mixed), cache, pieces, donate=(7,))
    assert program.aliased_bytes == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
    inputs_bytes = rows * cache.inputs.size // SLOTS * cache.inputs.dtype.itemsize
    assert program.temporary_bytes <= (0 if num_tokens == rows else inputs_bytes) + 4096, "no state is copied"
    launches = [launch.name for launch in program.launches]
    launches.remove("loop_concatenate_fusion")  # of the pieces, once in a step
    assert launches == ["delta_kernel"] if num_tokens == rows else len(launches) <= 7
    assert having(program.instructions("delta_kernel", nvdisasm), "LDL|STL") == set(), "registers spill"
