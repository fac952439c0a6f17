"""Compiles the kernels for the processor that runs them, and makes them known to XLA, once in a process."""

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
from llvmlite import binding, ir


class _Registered(NamedTuple):
    code: bytes
    engine: binding.ExecutionEngine


_registered: dict[str, _Registered] = {}
"""Object files and what holds them in memory, by name. XLA calls a kernel as long as the process lives, and takes a
name only once."""
_lock = threading.Lock()


def registered(name: str, emit: Callable[[ir.Module, str], None]) -> str:
    """The name under which XLA calls a kernel, which is compiled when it is first asked for.

    Args:
        name: The kernel's name, to which the kind of the processor's registers is added.
        emit: Emits it into a module, as a function of the name that it is given.
    """
    name = f"{name}_{'long' if has_long_registers() else 'short'}"
    with _lock:
        if name not in _registered:
            module = ir.Module(name)
            emit(module, name)
            _register(name, _compile(module))
    return name


def object_files() -> dict[str, bytes]:
    """The machine code of all kernels that are registered, by name."""
    with _lock:
        return {name: kernel.code for name, kernel in _registered.items()}


def register_all(files: Mapping[str, bytes]) -> None:
    """Registers kernels that `object_files` of another process gave, unless they are registered already.

    The processor must be of the same kind.
    """
    with _lock:
        for name, code in files.items():
            if name not in _registered:
                _register(name, code)


def _register(name: str, code: bytes) -> None:
    """Loads an object file, and makes the function of this name in it known to XLA."""
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), _machine())
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    capsule = jax.ffi.pycapsule(ctypes.CFUNCTYPE(ctypes.c_void_p)(engine.get_function_address(name)))
    jax.ffi.register_ffi_target(name, capsule, platform="cpu")
    _registered[name] = _Registered(code, engine)


def _machine() -> binding.TargetMachine:
    """This processor. On some that have long registers LLVM by itself would use half of each."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    features = binding.get_host_cpu_features().flatten()
    if has_long_registers():
        features += ",-prefer-256-bit"
    target = binding.Target.from_default_triple()
    cpu = binding.get_host_cpu_name()
    return target.create_target_machine(cpu=cpu, features=features, opt=3, codemodel="jitdefault", jit=True)


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


def _compile(module: ir.Module) -> bytes:
    """The object file of a module."""
    module.triple = binding.get_default_triple()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    # Loops are unrolled and vectors chosen by the kernels themselves. LLVM's own choices would spill registers.
    options = binding.create_pipeline_tuning_options(speed_level=2)
    options.loop_unrolling = options.slp_vectorization = options.loop_vectorization = False
    passes = binding.create_pass_builder(_machine(), options)
    passes.getModulePassManager().run(parsed, passes)
    return _machine().emit_object(parsed)
