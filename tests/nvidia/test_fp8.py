"""Products of e4m3 with e4m3, compiled for a card of each class that has them. Nothing here ran on a device."""

import functools
import pathlib

import jax.numpy as jnp
import pytest

from bench.nvidia import programs
from bench.nvidia.compiler import Program, array, compile_for
from bench.shapes import LLAMA_8B
from jsg.engine.device.cards import CLASSES, NAMES, Card, card, mesh_of
from jsg.engine.device.devices import E4M3_CAPABILITY
from jsg.engine.device.memory import extend_bound
from jsg.engine.device.targets import traced_for
from jsg.kernels_pallas import fp8_matmul, ops, tuning
from jsg.kernels_pallas.inputs import Fp8Kernel, GroupKernels
from jsg.sched.buckets import BucketKey, Phase
from tests.nvidia.test_classes import spills
from tests.nvidia.test_kernels import having
from tests.nvidia.test_step import check_forward

IN, OUT, NARROW = 4096, 6144, 1376
"""The last is what one of 8 devices has of 11 008 inputs, which no block of 128 divides."""
EXPERTS = 16
HAVING_E4M3 = [name for name in NAMES if card(name).capability >= E4M3_CAPABILITY]
QUICK = ("dense-8", "blocks-32", "blocks-256", "gated-512", "experts-4096")
CASES = [
    pytest.param(
        name,
        case,
        num_rows,
        marks=() if name in CLASSES.values() and f"{case}-{num_rows}" in QUICK else pytest.mark.long,
        id=f"{name}-{case}-{num_rows}",
    )
    for name in HAVING_E4M3
    for case, all_rows in {
        "dense": (8, 32, 64, 256, 4096),
        "narrow": (32,),
        "blocks": (8, 32, 64, 256, 4096),
        "experts": (16, 256, 4096),
        "gated": (16, 512, 4096),
    }.items()
    for num_rows in all_rows
]


def kernel(groups: int, *lead: int, depth: int = IN) -> Fp8Kernel:
    of_columns = array(*lead, groups, OUT, dtype="float32")
    return Fp8Kernel(array(*lead, OUT, depth, dtype="float8_e4m3fn"), of_columns)


@functools.cache
def compiled(name: str, case: str, num_rows: int) -> Program:
    x, sizes = array(num_rows, NARROW if case == "narrow" else IN), array(EXPERTS, dtype="int32")
    if case not in ("experts", "gated"):
        groups = IN // fp8_matmul.BLOCK if case == "blocks" else 1
        product = functools.partial(ops.matmul, result="bfloat16")
        return compile_for(name, product, x, kernel(groups, depth=x.shape[1]))
    if case == "experts":
        fn = functools.partial(ops.grouped_matmul, result="bfloat16")
        return compile_for(name, fn, x, kernel(IN // fp8_matmul.BLOCK, EXPERTS), sizes)
    fn = functools.partial(ops.grouped_gated, activation="silu", result="bfloat16")
    both = [GroupKernels(kernel(1, EXPERTS))] * 2
    return compile_for(name, fn, array(num_rows // 2, IN), array(num_rows, dtype="int32"), both, sizes)


def check_products(of: Card, counts: dict[str, int], rows: int) -> None:
    """16-byte asynchronous copies, and tensor cores that multiply e4m3.

    Those of a Hopper card do so from 64 rows on; for fewer each number becomes a float16 in registers.
    """
    copies = having(counts, "LDGSTS")
    assert copies and all(copy.endswith(".128") for copy in copies)
    has_groups = tuning.class_of(of.capability).has_warp_groups
    if has_groups and rows < 64:
        assert having(counts, "HMMA.*F32")
    else:
        assert having(counts, "QGMMA.*E4M3" if of.capability < (10, 0) and has_groups else "QMMA.*E4M3|UTCQMMA")


@pytest.mark.parametrize(("name", "case", "num_rows"), CASES)
def test_products_in_e4m3(name: str, case: str, num_rows: int, nvdisasm: pathlib.Path):
    """Two launches: one rounds rows, and one multiplies, scales and rounds. Nothing else is written."""
    program = compiled(name, case, num_rows)
    launch = program.kernel("fp8_matmul_kernel")
    assert [each.name for each in program.launches] == ["fp8_rounding_kernel", "fp8_matmul_kernel"]
    assert spills(program.instructions("fp8_rounding_kernel", nvdisasm)) == set()
    assert program.temporary_bytes <= 1.1 * num_rows * IN + 1024
    with traced_for(mesh_of(name)):
        count, kernels = EXPERTS if case in ("experts", "gated") else 1, 2 if case == "gated" else 1
        sizes = fp8_matmul.default_sizes(num_rows, count, kernels)
        calculated = fp8_matmul.shared_bytes(sizes, kernels)
    counts = program.instructions(launch.name, nvdisasm)
    assert spills(counts) == set()
    assert launch.shared_bytes <= calculated <= program.card.shared_bytes
    check_products(program.card, counts, sizes.block_m)


STEPS = {
    "decode-32": (BucketKey(Phase.DECODE, 32, 32), 31, 34),
    "decode-256": (BucketKey(Phase.DECODE, 256, 256), 29, 36),
    "prefill-8192": (BucketKey(Phase.EXTEND, programs.CHUNK, 256), 33, 580),
}
"""Shapes of steps, launches with two layers, and megabytes of temporaries, with 34 of cuBLAS for the head.

A layer has 11 launches, one less where attention is one: the norms and the gates round their rows, and one more launch
rounds those of attention. In bfloat16 it has one launch less.
"""


@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(
            name,
            step,
            marks=() if name in CLASSES.values() and (step == "decode-32" or name == "h200") else pytest.mark.long,
        )
        for name in HAVING_E4M3
        for step in STEPS
    ],
)
def test_a_step_multiplies_e4m3_and_writes_no_kernel(name: str, step: str, nvdisasm: pathlib.Path):
    key, launches, megabytes = STEPS[step]
    of = programs.make_model(LLAMA_8B, card=name, quantization="fp8", num_hidden_layers=2)
    program = of.programs.program(("forward", key))
    check_forward(program, of)
    assert len(of.kernels) == 4 and program.writers_of(of.kernels) == []
    assert sum(launch.name.startswith("fp8_matmul_kernel") for launch in program.launches) == 2 * 4
    rounding = [launch.name for launch in program.launches if launch.name.startswith("fp8_rounding_kernel")]
    assert len(rounding) == 2 * 4
    assert all(spills(program.instructions(each, nvdisasm)) == set() for each in set(rounding))
    assert len(program.launches) <= launches
    assert program.temporary_bytes <= megabytes * 10**6
    assert program.temporary_bytes <= extend_bound(of.config, key.num_tokens, jnp.bfloat16.dtype, restored_bytes=0)
