"""Makes the WebAssembly module of the kernels in `jsg/constrained/run`, and what JavaScript must know of Python's data.

    python js/grammar/build.py DIRECTORY    writes kernels.wasm and layout.js there

Numba's LLVM code of all kernels is compiled by numba's LLVM for `wasm32`. Kernels read addresses from words of 64 bits,
of which a pointer then keeps the lower 32. They allocate nothing and call nothing outside, so the object that LLVM
makes needs no linker: the module is the object without its notes for linkers, and with its last function exported.

    run(number, t, m, value, operands) -> result of that kernel    as `Kernels.__call__`; all are int32

`t`, `m` and `operands` are addresses of words: of the records, and an address and two lengths for each array.
"""

import dataclasses
import importlib
import itertools
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import llvmlite.binding as llvm
import numba
import numpy as np

from jsg.constrained import grammar, jit, link, tables
from jsg.constrained.limits import LIMITS
from jsg.constrained.run import machine, mask_cache, memory, slices, trie, vocab

_TARGET = "wasm32-unknown-unknown"
_CUSTOM, _FUNCTIONS, _EXPORTS, _CODE = 0, 3, 7, 10
"""Numbers of sections, of which the last two are neighbours here (WebAssembly core specification, 5.5)."""


def llvm_code() -> tuple[str, str]:
    """Numba's LLVM code of `link.run` with all kernels, not yet optimised for a processor, and the function's name."""
    with mock.patch.object(jit, "Kernels"):  # which would compile them for this processor
        importlib.import_module("jsg.constrained.run.kernels")
    options: Any = {"nogil": True, "_nrt": False, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    function: Any = numba.njit(pipeline_class=link.LinkedCompiler, **options)(link.run)
    function.compile(link.signature(tables.StaticTables, memory.Memory))
    (compiled,) = function.overloads.values()
    return str(compiled.library._final_module), compiled.fndesc.llvm_func_name


def with_run(code: str, name: str) -> str:
    """The code for another processor, with the function `run`, which calls the one of this name."""
    code = re.sub(r"(?m)^target .*$|^@_ZN08NumbaEnv.*$", "", code)  # environments are Python's
    code = re.sub(r"(?m)^define ", "define internal ", code.replace("define linkonce_odr", "define"))
    words = range(jit.WORDS * jit.MAX_ARRAYS)
    return "\n".join([
        code,
        "define i32 @run(i32 %number, ptr %t, ptr %m, i32 %value, ptr %operands) {",
        "%out = alloca i64\n%error = alloca ptr",
        "%kernel = zext i32 %number to i64\n%long = sext i32 %value to i64",
        *[f"%p{i} = getelementptr i64, ptr %operands, i32 {i}\n%w{i} = load i64, ptr %p{i}" for i in words],
        f"%status = call i32 @{name}(ptr %out, ptr %error, i64 %kernel, ptr %t, ptr %m, i64 %long, ",
        ", ".join(f"i64 %w{i}" for i in words),
        ")\n%found = load i64, ptr %out\n%result = trunc i64 %found to i32\nret i32 %result }",
    ])  # fmt: skip


def object_of(code: str) -> bytes:
    """The object of LLVM code, optimised for WebAssembly."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    module = llvm.parse_assembly(code)
    target = llvm.Target.from_triple(_TARGET).create_target_machine(opt=3)
    module.triple, module.data_layout = target.triple, str(target.target_data)
    module.verify()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return target.emit_object(module)


def module_of(data: bytes) -> bytes:
    """The module of an object. Its last function is `run`, since LLVM emits callers after what they call."""
    sections = [(kind, body) for kind, body in _sections(data) if kind != _CUSTOM]
    (functions,) = [body for kind, body in sections if kind == _FUNCTIONS]
    last = _read_uint(functions, 0)[0] - 1
    export = _uint(1) + _uint(3) + b"run\0" + _uint(last)
    sections.insert([kind for kind, _ in sections].index(_CODE), (_EXPORTS, export))
    return data[:8] + b"".join(bytes([kind]) + _uint(len(body)) + body for kind, body in sections)


def layout() -> str:
    """JavaScript of what both sides know: numbers by name, forms of files, records, kernels, sets of characters."""
    numbers: dict[str, int] = {}
    for module in (tables, memory, trie, slices, machine, grammar):
        for name, value in vars(module).items():
            if name.isupper() and type(value) in (int, float):
                assert numbers.setdefault(name, value) == value, f"{name} is two numbers"
    fields = jit.typing.get_type_hints(memory.Memory, include_extras=True)
    chars = {"TEXT": slices.ordinary_chars(b""), "JSON_TEXT": slices.ordinary_chars(slices._NOT_IN_JSON_STRINGS)}
    chars |= {"WORDS": slices._ascii_chars(slices._WORDS), "LOWER": slices._ascii_chars(slices._LOWER)}
    values: dict[str, Any] = numbers | {
        "_COMMON_BYTE": mask_cache._COMMON_BYTE,
        "LIMITS": {name: value for name, value in dataclasses.asdict(LIMITS).items() if name != "meter"},
        "MEMORY": {name: hint.__metadata__[0].itemsize for name, hint in fields.items()},
        "KERNELS": {kernel.__name__: number for number, kernel in enumerate(jit.entries())},
        "GRAMMAR": _form(tables._FORM),
        "VOCABULARY": _form(vocab.FORM),
        "CHARS": {name: _runs(table) for name, table in chars.items()},
    }
    return "".join(f"export const {name} = {json.dumps(value)};\n" for name, value in values.items())


def _form(form: Any) -> dict[str, Any]:
    return form._asdict() | {"kind": form.kind.decode()}


def _runs(table: np.ndarray) -> list[tuple[int, int]]:
    """Each number of a table, and how often it follows itself."""
    return [(number, len(list(same))) for number, same in itertools.groupby(table.ravel().tolist())]


def _sections(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The number and the contents of each section of a module."""
    at = 8
    while at < len(data):
        size, begin = _read_uint(data, at + 1)
        yield data[at], data[begin : begin + size]
        at = begin + size


def _read_uint(data: bytes, at: int) -> tuple[int, int]:
    """A number in LEB128, and the place after it."""
    low = data[at] & 127
    if data[at] < 128:
        return low, at + 1
    high, after = _read_uint(data, at + 1)
    return low | high << 7, after


def _uint(value: int) -> bytes:
    """A number in LEB128."""
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _uint(value >> 7)


def main() -> None:
    """Writes both files into the directory that the command names."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "kernels.wasm").write_bytes(module_of(object_of(with_run(*llvm_code()))))
    (directory / "layout.js").write_text(layout())


if __name__ == "__main__":
    main()
