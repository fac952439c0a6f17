"""Measures what the machine can do at best: reading memory, and fused multiply-adds in float32, on some threads.

The rates do not depend on any engine. Memory is read by the largest element of an array that no cache holds. The
multiply-adds are vectors of the processor's longest registers, twelve sums at a time, which touch no memory.
"""

import concurrent.futures
import ctypes
import functools
import os
import time
from collections.abc import Callable

import numpy as np
from llvmlite import binding

ARRAY_BYTES = 2**29
FMA_STEPS = 20_000_000
NUM_SUMS = 12
REPEATS = 5


def thread_counts() -> tuple[int, ...]:
    """One thread, and as many as there are cores for this process."""
    return tuple(sorted({1, len(os.sched_getaffinity(0))}))


def read_rates(num_threads: int, num_bytes: int = ARRAY_BYTES) -> list[float]:
    """Bytes read per second, in each of several passes."""
    parts = np.array_split(np.ones(num_bytes // 4, np.int32), num_threads)
    return [num_bytes / s for s in _seconds([functools.partial(np.max, part) for part in parts])]


def fma_rates(num_threads: int, steps: int = FMA_STEPS) -> list[float]:
    """Operations per second, two for each multiply-add, in each of several passes."""
    function, lanes, engine = _kernel()
    flops = 2 * lanes * NUM_SUMS * steps * num_threads
    found = [flops / s for s in _seconds([functools.partial(function, steps)] * num_threads)]
    del engine  # it holds the machine code, which must live until here
    return found


def _seconds(parts: list[Callable[[], object]]) -> list[float]:
    """Seconds of wall time in which all parts run, each on its own thread, several times after one other."""
    found = []
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        for _ in range(REPEATS + 1):
            started = time.perf_counter()
            for future in [pool.submit(part) for part in parts]:
                future.result()
            found.append(time.perf_counter() - started)
    return found[1:]


def _kernel() -> tuple[Callable[[int], float], int, binding.ExecutionEngine]:
    """The function of the number of steps, the numbers in a register, and what holds the machine code."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    features = binding.get_host_cpu_features()
    lanes = 16 if features.get("avx512f") else 8 if features.get("avx2") else 4
    target = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=f"{features.flatten()},-prefer-256-bit", opt=3
    )
    engine = binding.create_mcjit_compiler(binding.parse_assembly(_code(lanes)), target)
    engine.finalize_object()
    signature = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_int64)
    return signature(engine.get_function_address("multiply_adds")), lanes, engine


def _code(lanes: int) -> str:
    """LLVM's code of a loop of `NUM_SUMS` independent multiply-adds. It returns a sum, so that none can be left out."""
    kind = f"<{lanes} x float>"
    half = f"<{', '.join(['float 0.5'] * lanes)}>"
    start = [f"%s{i} = phi {kind} [ {half}, %entry ], [ %t{i}, %loop ]" for i in range(NUM_SUMS)]
    step = [
        f"%t{i} = call {kind} @llvm.fma.v{lanes}f32({kind} %s{i}, {kind} {half}, {kind} {half})"
        for i in range(NUM_SUMS)
    ]
    total = [f"%u{i} = fadd {kind} %t{i}, {'zeroinitializer' if i == 0 else f'%u{i - 1}'}" for i in range(NUM_SUMS)]
    lines = [
        f"declare {kind} @llvm.fma.v{lanes}f32({kind}, {kind}, {kind})",
        "define float @multiply_adds(i64 %steps) {",
        "entry: br label %loop",
        "loop: %i = phi i64 [ 0, %entry ], [ %next, %loop ]",
        *start,
        *step,
        "%next = add i64 %i, 1",
        "%more = icmp ult i64 %next, %steps",
        "br i1 %more, label %loop, label %end",
        "end:",
        *total,
        f"%first = extractelement {kind} %u{NUM_SUMS - 1}, i64 0",
        "ret float %first",
        "}",
    ]
    return "\n".join(lines)
