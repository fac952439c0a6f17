"""The exit from Pallas' Triton lowering, compiled for NVIDIA cards beside the kernel that it would replace.

A call by jax-triton has the kernel's PTX, which is assembled when a GPU loads the program. Here Triton's own assembler
does that, for the machine code. Nothing ran on a device.
"""

import functools
import os
import pathlib
import re
import subprocess
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("jax_triton", reason="`make test-long` runs it in an environment that has jax-triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton's interpreter compiles nothing", allow_module_level=True)

import triton

from bench.attention_cases import DECODE, MODELS, Case, make
from bench.nvidia import machine_code, model
from bench.nvidia.compiler import Program, array, compile_for
from bench.shapes import LLAMA_8B
from jsg.kernels_pallas import paged_decode as pallas
from jsg.kernels_pallas.paged_decode import Sizes
from jsg.sched.buckets import BucketKey, Phase
from tests.kernels_pallas import jax_triton_decode
from tests.nvidia.test_kernels import LLAMA, POOL_TOKENS, attention_inputs, having
from tests.nvidia.test_step import check_forward

pytestmark = pytest.mark.long

CALL = "kCustomCall"
PTXAS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"


class Kernel(NamedTuple):
    """A kernel that a program calls by jax-triton."""

    name: str
    shared_bytes: int
    ptx: str

    def instructions(self, folder: pathlib.Path, nvdisasm: pathlib.Path) -> Counter[str]:
        """How often each instruction occurs in its machine code."""
        (target,) = re.findall(r"^\.target (\w+)", self.ptx, re.MULTILINE)
        source, cubin = folder / "kernel.ptx", folder / "kernel.cubin"
        source.write_text(self.ptx)
        subprocess.run([PTXAS, f"--gpu-name={target}", source, "--output-file", cubin], check=True)
        return machine_code.count(machine_code.disassembled(cubin, nvdisasm), f".text.{self.name}")


def kernels(program: Program) -> list[Kernel]:
    """Reads the calls in the text of a program. Each is a compressed message, in which the kernel is nested twice."""
    found = []
    for text in re.findall(r'"triton_kernel_call_ffi".*?opaque = "((?:[^"\\]|\\.)*)"', program.hlo):
        escaped = re.sub(r"\\(\\|[0-9A-F]{2})", lambda each: chr(int(each[1], 16)) if each[1] != "\\" else "\\", text)
        kernel = _fields(_fields(_fields(zlib.decompress(escaped.encode("latin-1")))[1])[1])
        found.append(Kernel(kernel[1].decode(), kernel.get(3, 0), kernel[4].decode()))
    return found


def _fields(message: bytes) -> dict[int, int | bytes]:
    """The numbers and the strings of a message of protocol buffers by their number; the last of each."""
    fields, at = {}, 0
    while at < len(message):
        key, at = machine_code.varint(message, at)
        value, at = machine_code.varint(message, at)
        assert key & 7 in (0, 2), "other types do not occur"
        if key & 7 == 2:
            value, at = message[at : at + value], at + value
        fields[key >> 3] = value
    return fields


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
def test_the_whole_table_compiles(case: Case, splits: int):
    """With the sizes and cases that the interpreter computes in `tests/kernels_pallas/test_jax_triton.py`."""
    arrays = make(case, dtype="bfloat16")
    sizes = Sizes(splits, 64 if splits == 1 else 16, num_warps=4, num_stages=3)
    shapes = jax.tree.map(
        lambda x: array(*jnp.shape(x), dtype=jnp.result_type(x)),
        (arrays.queries, arrays.keys, arrays.values, arrays.inputs),
    )
    attend = functools.partial(
        jax_triton_decode.paged_decode, scale=1.0, window=case.window, softcap=case.softcap, sizes=sizes
    )
    program = compile_for("h100", attend, *shapes)
    names = ["decode_kernel"] if splits == 1 else ["decode_kernel", "combine_kernel"]
    assert [kernel.name for kernel in kernels(program)] == names
    assert [launch.name for launch in program.launches].count(CALL) == len(names)


@pytest.mark.parametrize("rows", [32, 256])
@pytest.mark.parametrize(
    ("card", "pool_dtype"),
    [("a100_80gb", "bfloat16"), ("l4", "bfloat16"), ("h100", "bfloat16"), ("h100", "float8_e4m3fn")],
)
def test_kernels_are_as_those_that_they_replace(
    card: str, pool_dtype: str, rows: int, nvdisasm: pathlib.Path, tmp_path: pathlib.Path
):
    """They take as much shared memory, copy 16 bytes at a time, multiply by tensor cores, and spill no register."""
    heads, kv_heads, head_dim = MODELS[LLAMA]
    pool = array(POOL_TOKENS, 1, kv_heads, head_dim, dtype=pool_dtype)
    args = array(rows, heads, head_dim), pool, pool, attention_inputs(rows, 1, tiles=0, groups=0)
    ours, theirs = (
        compile_for(card, lambda *args, entry=entry: entry(*args, scale=1.0).out, *args)
        for entry in (jax_triton_decode.paged_decode, pallas.paged_decode)
    )
    for kernel in kernels(ours):
        counts = kernel.instructions(tmp_path, nvdisasm)
        assert having(counts, "LDL|STL") == set(), "registers spill"
        if kernel.name == "decode_kernel":
            assert kernel.shared_bytes == theirs.kernel("_decode_kernel").shared_bytes
            copies = having(counts, "LDGSTS")
            assert copies and all(copy.endswith(".128") for copy in copies)
            assert having(counts, "HMMA")


@pytest.fixture
def leave_pallas(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Puts the exit behind `ops.paged_attention` when it is called."""

    def leave() -> None:
        jax.clear_caches()
        monkeypatch.setattr(pallas, "paged_decode", jax_triton_decode.paged_decode)

    yield leave
    jax.clear_caches()


@pytest.mark.parametrize("rows", [32, 256])
def test_a_step_stays_one_command_buffer(rows: int, leave_pallas: Callable[[], None]):
    """The calls are in it with cuBLASLt's, a layer has as many launches, and the pool is changed in place."""

    def step() -> tuple[Program, model.Model]:
        of = model.make_model(LLAMA_8B, card="h100", num_hidden_layers=2)
        return of.programs.program(("forward", BucketKey(Phase.DECODE, rows, rows))), of

    by_pallas, _ = step()
    leave_pallas()
    program, of = step()
    check_forward(program, of)
    names = Counter(launch.kernel for launch in program.launches)
    assert names[CALL] == 2 * (1 if rows == 256 else 2)
    assert names["kCublasLtMatmul"] == 2 * 4 + 1
    assert len(program.launches) <= len(by_pallas.launches)
