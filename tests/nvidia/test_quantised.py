"""Steps with kernels in 8 and 4 bits, compiled for an H200: no kernel is written anew in a longer type.

As in `test_step.py`, nothing here ran on a device. The figures are those of docs/architecture.md.
"""

import functools
import itertools

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
def quantised(shape: str, quantization: str) -> programs.Model:
    return programs.make_model(SHAPES[shape], quantization=quantization, num_hidden_layers=2, fp8_products="off")


MOST = {
    ("dense", "decode-32"): (33, 3.1),
    ("dense", "decode-256"): (30, 10),
    ("dense", "prefill-8192"): (32, 840),
    ("dense", "decode-256", "int8"): (30, 18),
    ("experts", "decode-32"): (40, 2.4),
    ("experts", "decode-256"): (38, 13),
    ("experts", "prefill-8192"): (44, 1150),
}
"""Launches with two layers, and megabytes of temporaries.

For few rows int8 has jsg's own product, which makes sums of parts of the inputs: four of 32 by 6144 numbers.
"""
MOST_IN_4_BITS = {"decode-32": (33, 34), "decode-256": (30, 36), "prefill-8192": (32, 840)}
"""The same of a dense model. The head is in bfloat16, and cuBLAS multiplies it, with a workspace of 34 MB.

For prompts norms add the residual stream themselves. That saves two launches, and keeps one more array of 67 MB.
"""
BETWEEN = (("dense", "decode-256"), ("experts", "decode-32"))


@pytest.mark.parametrize(
    ("shape", "step", "quantization"),
    [
        *((*each, "int8") for each in itertools.product(SHAPES, KEYS) if each not in BETWEEN),
        ("dense", "decode-256", "fp8"),
        *(pytest.param(shape, step, "int8", marks=pytest.mark.long) for shape, step in BETWEEN),
        pytest.param("experts", "prefill-8192", "fp8", marks=pytest.mark.long),
    ],
)
def test_kernels_in_8_bits_are_never_written_in_a_longer_type(shape: str, step: str, quantization: str):
    """What another step of the same model or another type of 8 bits shows too is long."""
    of, name = quantised(shape, quantization), ("forward", KEYS[step])
    program = of.programs.program(name)
    check_forward(program, of)
    assert len(of.kernels) == 4 and program.writers_of(of.kernels) == []
    assert [launch.name for launch in program.launches if "Cublas" in launch.name] == []
    own = sum(launch.name.startswith("few_bits_matmul_kernel") for launch in program.launches)
    is_own = quantization == "int8" and KEYS[step].num_tokens <= 256
    assert own == (2 * {"dense": 4, "experts": 2}[shape] if is_own else 0), "for few rows it is faster than XLA's"
    launches, megabytes = MOST.get((shape, step, quantization)) or MOST[shape, step]
    assert program.temporary_bytes <= megabytes * 10**6
    num_tokens = KEYS[step].num_tokens
    assert program.temporary_bytes <= extend_bound(of.config, num_tokens, jnp.bfloat16.dtype, restored_bytes=0)
    assert len(program.launches) <= launches


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=pytest.mark.long if step == "decode-256" else ()) for step in KEYS]
)
def test_kernels_in_4_bits_are_never_written_in_a_longer_type(step: str):
    """Each is read by jsg's own launch. For few rows sums of parts are added up by another."""
    of, name = quantised("dense", "int4"), ("forward", KEYS[step])
    program = of.programs.program(name)
    check_forward(program, of)
    assert len(of.kernels) == 4 and program.writers_of(of.kernels) == []
    launches, megabytes = MOST_IN_4_BITS[step]
    assert sum(launch.name.startswith("few_bits_matmul_kernel") for launch in program.launches) == 2 * len(of.kernels)
    assert program.temporary_bytes <= megabytes * 10**6
    dtype = jnp.bfloat16.dtype
    assert program.temporary_bytes <= extend_bound(of.config, KEYS[step].num_tokens, dtype, restored_bytes=0)
    assert len(program.launches) <= launches


def test_left_to_cublas_every_kernel_would_be():
    """Why engines with kernels in 8 bits have options of their own: XLA multiplies many rows."""
    of = programs.make_model(LLAMA_8B, quantization="int8", options_of="none", num_hidden_layers=1)
    program = of.programs.program(("forward", KEYS["prefill-8192"]))
    assert len(program.writers_of(of.kernels)) == len(of.kernels) == 4
