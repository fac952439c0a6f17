"""Compiles the kernels for the processor that runs them, and makes them known to XLA, once in a process."""

import ctypes
import functools
import threading
from collections.abc import Callable

import jax
from llvmlite import binding, ir

_compiled: dict[str, binding.ExecutionEngine] = {}
"""What was compiled, by name. XLA calls it as long as the process lives, and takes a name only once."""
_lock = threading.Lock()


def registered(name: str, emit: Callable[[ir.Module, str], None]) -> str:
    """The name under which XLA calls a kernel, which is compiled when it is first asked for.

    Args:
        name: The kernel's name, to which the kind of the processor's registers is added.
        emit: Emits it into a module, as a function of the name that it is given.
    """
    name = f"{name}_{'long' if has_long_registers() else 'short'}"
    with _lock:
        if name not in _compiled:
            module = ir.Module(name)
            emit(module, name)
            engine = _engine(module)
            capsule = jax.ffi.pycapsule(ctypes.CFUNCTYPE(ctypes.c_void_p)(engine.get_function_address(name)))
            jax.ffi.register_ffi_target(name, capsule, platform="cpu")
            _compiled[name] = engine
    return name


def _machine() -> binding.TargetMachine:
    """This processor. On some that have long registers LLVM by itself would use half of each."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    features = binding.get_host_cpu_features().flatten()
    if has_long_registers():
        features += ",-prefer-256-bit"
    target = binding.Target.from_default_triple()
    return target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, opt=3)


def has_long_registers() -> bool:
    """Whether kernels are for 32 registers of 16 float32 each, as processors with AVX-512 have."""
    return has_avx512()


def has_avx512() -> bool:
    """Whether the processor has AVX-512."""
    return _has("avx512f")


def rounds_to_bfloat16() -> bool:
    """Whether kernels round 16 float32 to bfloat16 in one instruction, as processors with AVX512-BF16 can."""
    return has_long_registers() and _has("avx512bf16")


def multiplies_pairs() -> bool:
    """Whether kernels multiply pairs of bfloat16 in one instruction, as processors with AVX512-BF16 can."""
    return rounds_to_bfloat16()


@functools.cache
def _has(feature: str) -> bool:
    return bool(binding.get_host_cpu_features().get(feature))


def _engine(module: ir.Module) -> binding.ExecutionEngine:
    module.triple = binding.get_default_triple()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    # Loops are unrolled and vectors chosen by the kernels themselves. LLVM's own choices would spill registers.
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.slp_vectorization = options.loop_vectorization = False
    passes = binding.create_pass_builder(_machine(), options)
    passes.getModulePassManager().run(parsed, passes)
    engine = binding.create_mcjit_compiler(parsed, _machine())
    engine.finalize_object()
    return engine
