"""Every program that encodes tiles or frames with the tower of the published LLaVAs, compiled for an H200.

As in `test_step.py`, nothing here ran on a device. The figures are those of docs/performance.md.
"""

import functools

import pytest

from bench.device.shapes import CLIP_L_336, MISTRAL_7B
from bench.nvidia import programs
from bench.nvidia.compiler import IN_PLACE
from bench.shapes import llava_next_video
from jsg.engine.device.memory import WORKSPACE_BYTES
from jsg.engine.shapes import OTHER_ENCODE_SIZES

MAX_LAUNCHES = 22
"""Of a layer of the tower. Six are matmuls; heads are turned, and what is no multiple of 8, like 577 places, padded."""
TILE_BYTES = 32 * 10**6
"""Temporaries of a tile: above all its scores in float32 and what is made of them."""


@functools.cache
def seeing(num_layers: int, quantization: str = "none") -> programs.Model:
    """A LLaVA-NeXT that takes videos too, over one layer of its text model."""
    tower = CLIP_L_336 | {"num_hidden_layers": num_layers}
    return programs.make_model(llava_next_video(MISTRAL_7B, tower), quantization=quantization, num_hidden_layers=1)


IN_CI = ((min(OTHER_ENCODE_SIZES), False), (min(OTHER_ENCODE_SIZES), True), (max(OTHER_ENCODE_SIZES), False))


@pytest.mark.parametrize(
    ("count", "is_video"),
    [
        pytest.param(
            count,
            is_video,
            marks=() if (count, is_video) in IN_CI else pytest.mark.long,
            id=f"{count}-{'frames' if is_video else 'tiles'}",
        )
        for is_video in (False, True)
        for count in OTHER_ENCODE_SIZES
    ],
)
def test_encoding(count: int, is_video: bool):
    """Features are written into the pool where it lies, and no kernel of the tower is written anew.

    Sizes between the smallest and the largest are long, and so is the largest number of frames.
    """
    num_layers = CLIP_L_336["num_hidden_layers"] if count == max(OTHER_ENCODE_SIZES) else 4
    of, name = seeing(num_layers), ("encode", count, is_video)
    program = of.programs.program(name)
    assert of.vision is not None
    assert program.aliased_bytes == of.vision.size * of.vision.dtype.itemsize
    assert program.makers_of(of.vision.size) <= IN_PLACE | {"scatter", "fusion"}, "it writes rows and copies nothing"
    assert len(of.tower_kernels) == 5 and program.writers_of(of.tower_kernels) == []
    assert program.temporary_bytes <= count * TILE_BYTES + WORKSPACE_BYTES
    assert program.is_one_command_buffer
    assert program.fits
    shallow = seeing(3).programs.program(name)
    assert len(program.launches) - len(shallow.launches) <= (num_layers - 3) * MAX_LAUNCHES


def test_temporaries_do_not_grow_with_the_layers():
    deep, shallow = (seeing(num_layers).programs.program(("encode", 8, False)) for num_layers in (4, 3))
    assert deep.temporary_bytes <= shallow.temporary_bytes + 2**20


def test_a_tower_beside_kernels_in_8_bits_is_encoded_like_any_other():
    seeing(3, "int8").programs.program(("encode", 8, False))
