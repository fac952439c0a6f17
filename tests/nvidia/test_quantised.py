"""Steps with kernels in 8 and 4 bits, compiled for an H200: no kernel is written anew in a longer type.

As in `test_step.py`, nothing here ran on a device. The figures are those of docs/architecture.md.
"""

import functools

import jax.numpy as jnp
import pytest

from bench.device.shapes import MIXTRAL_8X7B
from bench.nvidia import programs
from bench.shapes import LLAMA_8B
from jsg.engine.device.memory import extend_bound
from jsg.sched.buckets import BucketKey, Phase
from tests.nvidia.test_step import check_forward

SHAPES = {"dense": LLAMA_8B, "experts": MIXTRAL_8X7B}
KEYS = {
    "decode-32": BucketKey(Phase.DECODE, 32, 32),
    "decode-256": BucketKey(Phase.DECODE, 256, 256),
    "prefill-8192": BucketKey(Phase.EXTEND, programs.CHUNK, 256),
}


@functools.cache
def quantised(shape: str, quantization: str, num_layers: int) -> programs.Model:
    how = {"quantization": quantization, "num_hidden_layers": num_layers}
    return programs.make_model(SHAPES[shape], **how, fp8_products="off")


MOST = {
    ("dense", "decode-32"): (13, 3.1),
    ("dense", "decode-256"): (11, 10),
    ("dense", "prefill-8192"): (10, 850),
    ("experts", "decode-32"): (15, 6),
    ("experts", "decode-256"): (16, 20),
    ("experts", "prefill-8192"): (15, 1150),
}
"""Launches of a layer, and megabytes of temporaries. Of int8, jsg's own product has four sums of 32 by 6144 numbers."""
MOST_IN_4_BITS = {"decode-32": (12, 34), "decode-256": (11, 36), "prefill-8192": (10, 840)}
"""The same of a dense model. The head is in bfloat16, and cuBLAS multiplies it, with a workspace of 34 MB.

For prompts norms add the residual stream themselves. That saves two launches, and keeps one more array of 67 MB.
"""
BETWEEN = (("dense", "decode-256"), ("experts", "decode-32"))


@pytest.mark.parametrize(
    ("shape", "step", "quantization"),
    [
        *((shape, step, "int8") for shape, step in MOST if (shape, step) not in BETWEEN),
        ("dense", "decode-256", "fp8"),
        *(pytest.param(shape, step, "int8", marks=pytest.mark.long) for shape, step in BETWEEN),
        pytest.param("experts", "prefill-8192", "fp8", marks=pytest.mark.long),
    ],
)
def test_kernels_in_8_bits_are_never_written_in_a_longer_type(shape: str, step: str, quantization: str):
    """What another step of the same model or another type of 8 bits shows too is long."""
    of, name = quantised(shape, quantization, 2), ("forward", KEYS[step])
    program = of.programs.program(name)
    check_forward(program, of)
    assert len(of.kernels) == 4 and program.writers_of(of.kernels) == []
    assert [launch.name for launch in program.launches if "Cublas" in launch.name] == []
    own = sum(launch.name.startswith("few_bits_matmul_kernel") for launch in program.launches)
    is_own = quantization == "int8" and KEYS[step].num_tokens <= 256
    assert own == (2 * {"dense": 4, "experts": 2}[shape] if is_own else 0), "for few rows it is faster than XLA's"
    launches, megabytes = MOST[shape, step]
    assert program.temporary_bytes <= megabytes * 10**6
    num_tokens = KEYS[step].num_tokens
    assert program.temporary_bytes <= extend_bound(of.config, num_tokens, jnp.bfloat16.dtype.itemsize, restored_bytes=0)
    shallow = quantised(shape, quantization, 1).programs.program(name)
    assert len(program.launches) - len(shallow.launches) <= launches


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=pytest.mark.long if step == "decode-256" else ()) for step in KEYS]
)
def test_kernels_in_4_bits_are_never_written_in_a_longer_type(step: str):
    """Each is read by jsg's own launch. For few rows sums of parts are added up by another."""
    of, name = quantised("dense", "int4", 2), ("forward", KEYS[step])
    program = of.programs.program(name)
    check_forward(program, of)
    assert len(of.kernels) == 4 and program.writers_of(of.kernels) == []
    launches, megabytes = MOST_IN_4_BITS[step]
    assert sum(launch.name.startswith("few_bits_matmul_kernel") for launch in program.launches) == 2 * len(of.kernels)
    assert program.temporary_bytes <= megabytes * 10**6
    itemsize = jnp.bfloat16.dtype.itemsize
    assert program.temporary_bytes <= extend_bound(of.config, KEYS[step].num_tokens, itemsize, restored_bytes=0)
    shallow = quantised("dense", "int4", 1).programs.program(name)
    assert len(program.launches) - len(shallow.launches) <= launches


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=() if step == "decode-256" else pytest.mark.long) for step in KEYS]
)
def test_left_to_cublas_every_kernel_would_be(step: str):
    """Why engines with kernels in 8 bits have options of their own."""
    of = programs.make_model(LLAMA_8B, quantization="int8", options_of="none", num_hidden_layers=1)
    program = of.programs.program(("forward", KEYS[step]))
    assert len(program.writers_of(of.kernels)) == len(of.kernels) == 4
