"""Makes a WebAssembly module of the kernels in `jsg/constrained/run`: `python js/grammar/build.py FILE`.

Numba's LLVM code of all kernels is compiled by numba's LLVM for `wasm32`. Kernels read addresses from words of 64 bits,
of which a pointer then keeps the lower 32. They allocate nothing and call nothing, so the object needs no linker: the
module is the object with a section that exports a function for each kernel.

    kernel(t, m, value, operands) -> its result    as `Kernels.__call__`; all are int32

`t`, `m` and `operands` are addresses of words: of the records, and an address and two lengths for each array.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numba

from jsg.constrained import jit

_TARGET = "wasm32-unknown-unknown"
_CUSTOM, _EXPORT, _CODE = 0, 7, 10
"""Numbers of sections, which come in this order but for custom ones (WebAssembly core specification, 5.5)."""
_FUNCTION, _SECTION, _SYMBOL_TABLE, _UNDEFINED = 0, 3, 8, 0x10
"""Numbers in the section "linking", which has the names of functions (WebAssembly/tool-conventions, Linking.md)."""


def llvm_code() -> tuple[str, str]:
    """Numba's LLVM code of `link.run` with all kernels, not yet optimised for a processor, and the function's name."""
    kernels = importlib.import_module("jsg.constrained.run.kernels")
    link = importlib.import_module("jsg.constrained.link")
    tables, memory = importlib.import_module("jsg.constrained.tables"), importlib.import_module("jsg.constrained.run.memory")
    assert kernels.run, "it is made last, when all kernels are there"
    options: Any = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    function: Any = numba.njit(pipeline_class=link.LinkedCompiler, **options)(link.run)
    function.compile(link.signature(tables.StaticTables, memory.Memory))
    (compiled,) = function.overloads.values()
    return str(compiled.library._final_module), compiled.fndesc.llvm_func_name


def with_exports(code: str, run: str) -> str:
    """The code for another processor, with a function for each kernel that calls `run`."""
    code = re.sub(r"(?m)^target .*$|^@_ZN08NumbaEnv.*$", "", code)  # environments are Python's
    code = re.sub(r"(?m)^define ", "define internal ", code.replace("define linkonce_odr", "define"))
    words = range(jit.WORDS * jit.MAX_ARRAYS)
    loads = [f"%p{i} = getelementptr i64, ptr %operands, i32 {i}\n%w{i} = load i64, ptr %p{i}" for i in words]
    given = ", ".join(f"i64 %w{i}" for i in words)
    exports = [
        f"define i32 @{kernel.__name__}(ptr %t, ptr %m, i32 %value, ptr %operands) {{\n"
        f"%result = call i32 @run(i64 {number}, ptr %t, ptr %m, i32 %value, ptr %operands)\nret i32 %result }}"
        for number, kernel in enumerate(jit.entries())
    ]
    return "\n".join([
        code,
        "define internal i32 @run(i64 %number, ptr %t, ptr %m, i32 %value, ptr %operands) noinline {",
        "%out = alloca i64\n%error = alloca ptr\n%long = sext i32 %value to i64",
        *loads,
        f"%status = call i32 @{run}(ptr %out, ptr %error, i64 %number, ptr %t, ptr %m, i64 %long, {given})",
        "%found = load i64, ptr %out\n%result = trunc i64 %found to i32\nret i32 %result }",
        *exports,
    ])  # fmt: skip


def object_of(code: str) -> bytes:
    """The object of LLVM code, optimised for WebAssembly."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(code)
    machine = llvm.Target.from_triple(_TARGET).create_target_machine(opt=3)
    module.triple, module.data_layout = machine.triple, str(machine.target_data)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return machine.emit_object(module)


def module_of(data: bytes, names: list[str]) -> bytes:
    """The module of an object: without what only linkers read, and with these functions exported."""
    sections = list(_sections(data))
    (linking,) = [body for kind, body in sections if kind == _CUSTOM and body[1:8] == b"linking"]
    numbers = _function_numbers(linking[8:])
    exports = [_uint(len(name)) + name.encode() + b"\0" + _uint(numbers[name]) for name in names]
    kept = [(kind, body) for kind, body in sections if kind != _CUSTOM]
    place = [kind for kind, _ in kept].index(_CODE)  # there is nothing between exports and code, since there are no tables
    kept.insert(place, (_EXPORT, _uint(len(exports)) + b"".join(exports)))
    return data[:8] + b"".join(bytes([kind]) + _uint(len(body)) + body for kind, body in kept)


def _sections(data: bytes, at: int = 8) -> Iterator[tuple[int, bytes]]:
    """The number and the contents of each section, from a place on."""
    while at < len(data):
        size, begin = _read_uint(data, at + 1)
        yield data[at], data[begin : begin + size]
        at = begin + size


def _function_numbers(linking: bytes) -> dict[str, int]:
    """The number of each function, by name."""
    _, at = _read_uint(linking, 0)  # the version
    ((_, symbols),) = [part for part in _sections(linking, at) if part[0] == _SYMBOL_TABLE]
    count, at = _read_uint(symbols, 0)
    numbers: dict[str, int] = {}
    for _ in range(count):
        kind = symbols[at]
        flags, at = _read_uint(symbols, at + 1)
        number, at = _read_uint(symbols, at)
        if kind != _SECTION and not flags & _UNDEFINED:
            length, begin = _read_uint(symbols, at)
            at = begin + length
            if kind == _FUNCTION:
                numbers[symbols[begin:at].decode()] = number
    return numbers


def _read_uint(data: bytes, at: int) -> tuple[int, int]:
    """A number in LEB128, and the place after it."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at


def _uint(value: int) -> bytes:
    """A number in LEB128."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _uint(value >> 7)


def main() -> None:
    code, run = llvm_code()
    names = [kernel.__name__ for kernel in jit.entries()]
    Path(sys.argv[1]).write_bytes(module_of(object_of(with_exports(code, run)), names))


if __name__ == "__main__":
    main()
