"""The short convolution of LFM2-8B-A1B between its gates, compiled for cards: slots in place, and few launches."""

import jax.numpy as jnp
import pytest

from bench.nvidia.compiler import array, compile_for
from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import Pieces
from tests.nvidia.test_delta import CARDS, SLOTS

CHANNELS, TAPS = 2048, 3


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 1), (32, 32), (256, 256), (512, 256)])
@pytest.mark.parametrize("name", CARDS)
def test_slots_are_changed_in_place(name: str, num_tokens: int, rows: int):
    """Three launches: the results, the new columns of the rows of a step, and their writing.

    Others compare places and lengths, which are the same in all layers, so that a step does it once.
    """
    slots = array(SLOTS, TAPS, CHANNELS)
    pieces = Pieces(*[array(rows, dtype="int32")] * len(Pieces._fields))

    def layer(first, gate, x, taps, inputs, pieces):
        out, inputs = ops.short_convolution(first * x, taps, inputs, pieces, has_one_token=num_tokens == rows)
        return (out * gate.astype(jnp.float32)).astype(gate.dtype), inputs

    numbers = [array(num_tokens, CHANNELS)] * 3
    program = compile_for(name, layer, *numbers, array(TAPS, CHANNELS), slots, pieces, donate=(4,))
    assert program.aliased_bytes == slots.size * slots.dtype.itemsize
    assert program.temporary_bytes <= slots.size // SLOTS * (rows + 1) * slots.dtype.itemsize + 4096, (
        "no slot is copied"
    )
    launches = [launch.name for launch in program.launches]
    assert len(launches) <= (5 if num_tokens == rows else 7)
    assert len([name for name in launches if "compare" not in name and "reduce" not in name]) <= 3
