"""Makes one function of all kernels, which is compiled in a quarter of the time. Only `jit.py` imports it, with numba.

Numba makes a library of each function: it links the libraries of all functions that are called into it, optimises the
whole and emits its machine code. A function that twelve others reach is compiled twelve times. Here only one function
is emitted, with a case for each kernel, and the libraries of all others are only linked. It also receives tables and
memory as addresses, since numba would pass each of their arrays as seven numbers in each call.
"""

import logging
import operator
from collections.abc import Sequence
from typing import Any

from numba import types
from numba.core import cgutils, compiler
from numba.core.codegen import JITCodeLibrary
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global
from numba.core.typing.templates import signature as typed
from numba.extending import (
    NativeValue,
    infer_getattr,
    intrinsic,
    lower_builtin,
    lower_getattr,
    lower_getattr_generic,
    models,
    register_model,
    unbox,
)

from jsg.constrained import jit

logger = logging.getLogger(__name__)

INT = types.int64
_typed_by: Any = infer_global


class Array(types.Type):
    """A C-contiguous array that is indexed by ints from 0 on. Numba's own arrays can do more, and take far longer."""

    def __init__(self, dtype: Any, ndim: int, is_given: bool = False):
        """`is_given` means that kernels may not write to it."""
        super().__init__(name=f"Array({dtype}, {ndim}, {is_given})")
        self.dtype, self.ndim, self.is_given = dtype, ndim, is_given
        self.lengths = types.UniTuple(INT, ndim)


@register_model(Array)
class _ArrayModel(models.StructModel):
    def __init__(self, manager: Any, kind: Array):
        super().__init__(manager, kind, [("data", types.CPointer(kind.dtype)), ("shape", kind.lengths)])


def _indexed(array: Any, index: Any) -> tuple[Any, Any] | None:
    """The types of an index and of what is there; None if the array is another one."""
    if not isinstance(array, Array):
        return None
    if isinstance(index, types.BaseTuple):
        return types.UniTuple(INT, array.ndim), array.dtype
    return INT, array.dtype if array.ndim == 1 else Array(array.dtype, 1, array.is_given)


class _First(AbstractTemplate):
    """Numba asks templates for this target before its own, which are many."""

    metadata = {"target": "cpu"}  # noqa: RUF012


@_typed_by(operator.getitem)
class _GetItem(_First):
    def generic(self, args: Sequence[Any], _: object) -> Any:
        found = _indexed(args[0], args[1])
        return typed(found[1], args[0], found[0]) if found else None


@_typed_by(operator.setitem)
class _SetItem(_First):
    def generic(self, args: Sequence[Any], _: object) -> Any:
        found = _indexed(args[0], args[1])
        return typed(types.none, args[0], *found) if found and not args[0].is_given else None


@_typed_by(len)
class _Len(_First):
    def generic(self, args: Sequence[Any], _: object) -> Any:
        return typed(INT, args[0]) if isinstance(args[0], Array) else None


def _place(context: Any, builder: Any, kinds: Sequence[Any], given: Sequence[Any]) -> tuple[Any, Any]:
    """The address of what an index means, and the lengths of an array's axes."""
    array = context.make_helper(builder, kinds[0], value=given[0])
    shape = cgutils.unpack_tuple(builder, array.shape)
    index = cgutils.unpack_tuple(builder, given[1]) if isinstance(kinds[1], types.BaseTuple) else [given[1]]
    place = index[0]
    if kinds[0].ndim == 2:
        place = builder.mul(place, shape[1])
    if len(index) == 2:
        place = builder.add(place, index[1])
    return builder.gep(array.data, [place], inbounds=True), shape


@lower_builtin(operator.getitem, Array, types.Any)
def _get(context: Any, builder: Any, sig: Any, given: Sequence[Any]) -> Any:
    address, shape = _place(context, builder, sig.args, given)
    if not isinstance(sig.return_type, Array):
        return builder.load(address)
    row = context.make_helper(builder, sig.return_type)
    row.data, row.shape = address, cgutils.pack_array(builder, shape[1:])
    return row._getvalue()


@lower_builtin(operator.setitem, Array, types.Any, types.Any)
def _set(context: Any, builder: Any, sig: Any, given: Sequence[Any]) -> Any:
    builder.store(given[2], _place(context, builder, sig.args, given)[0])
    return context.get_dummy_value()


@infer_getattr
class _ArrayFields(AttributeTemplate):
    key = Array

    def generic_resolve(self, array: Array, name: str) -> Any:
        return array.lengths if name == "shape" else None


@lower_getattr(Array, "shape")
def _shape(context: Any, builder: Any, kind: Array, value: Any) -> Any:
    return context.make_helper(builder, kind, value=value).shape


@lower_builtin(len, Array)
def _len(context: Any, builder: Any, sig: Any, given: Sequence[Any]) -> Any:
    return builder.extract_value(_shape(context, builder, sig.args[0], given[0]), 0)


class Record(types.Type):
    """A NamedTuple as the address of its description, which Python gives as bytes: `jit.WORDS` words for each field."""

    def __init__(self, name: str, fields: dict[str, Any]):
        super().__init__(name=f"Record({name})")
        self.fields = fields


register_model(Record)(models.OpaqueModel)


@unbox(Record)
def _unbox_record(_: Record, value: Any, c: Any) -> Any:
    return NativeValue(c.pyapi.bytes_as_string(value))


@infer_getattr
class _RecordFields(AttributeTemplate):
    key = Record

    def generic_resolve(self, record: Record, name: str) -> Any:
        return record.fields.get(name)


@lower_getattr_generic(Record)
def _get_field(context: Any, builder: Any, record: Record, value: Any, name: str) -> Any:
    kind, place = record.fields[name], jit.WORDS * list(record.fields).index(name)
    words = []
    for i in range(place, place + jit.WORDS):
        address = builder.bitcast(value, cgutils.intp_t.as_pointer())
        words.append(builder.load(builder.gep(address, [cgutils.intp_t(i)], inbounds=True)))
        words[-1].set_metadata("invariant.load", builder.module.add_metadata([]))  # nothing writes to them meanwhile
    return _array(context, builder, kind, words) if isinstance(kind, Array) else words[0]


def _array(context: Any, builder: Any, kind: Array, words: Sequence[Any]) -> Any:
    """An array of this kind from its address and the lengths of its axes."""
    array = context.make_helper(builder, kind)
    array.data = builder.inttoptr(words[0], array.data.type)
    array.shape = cgutils.pack_array(builder, words[1 : 1 + kind.ndim])
    return array._getvalue()


class Operand(types.Type):
    """Any array that Python gives, as its address and the lengths of its axes."""

    def __init__(self) -> None:
        super().__init__(name="Operand")


@register_model(Operand)
class _OperandModel(models.StructModel):
    def __init__(self, manager: Any, kind: Operand):
        super().__init__(manager, kind, [("address", INT), ("first", INT), ("second", INT)])


@unbox(Operand)
def _unbox_operand(kind: Operand, value: Any, c: Any) -> Any:
    # Numba's function writes the lengths of all axes in a row, after which it writes their strides.
    array = c.context.make_array(types.Array(types.uint8, 2, "C"))(c.context, c.builder)
    failed = c.pyapi.numba_array_adaptor(value, c.builder.bitcast(array._getpointer(), c.pyapi.voidptr))
    operand = c.context.make_helper(c.builder, kind)
    operand.address = c.builder.ptrtoint(array.data, cgutils.intp_t)
    operand.first, operand.second = cgutils.unpack_tuple(c.builder, array.shape)
    return NativeValue(operand._getvalue(), is_error=cgutils.is_not_null(c.builder, failed))


class _NoEnvironment:
    """Numba writes the address of a function's Python environment into its code, which is emitted elsewhere here."""

    def set_env(self, name: str, environment: object) -> None: ...


class _LinkedLibrary(JITCodeLibrary):
    """A library that is neither optimised nor emitted, but linked into others."""

    @property
    def codegen(self) -> Any:
        return _NoEnvironment()

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        return 0

    def _optimize_final_module(self) -> None: ...

    def _finalize_final_module(self) -> None:
        self._finalized = True


class LinkedCompiler(compiler.Compiler):
    """Numba's compiler for functions that are only called by compiled ones."""

    def __init__(self, typing: Any, target: Any, _: None, *rest: Any):
        super().__init__(typing, target, _LinkedLibrary(target.codegen(), "kernels"), *rest)


@intrinsic
def _call(_: Any, number: Any, t: Record, m: Record, value: Any, operands: Any) -> Any:
    """Calls a kernel by its number."""
    kernels = _compile_kernels()

    def emit(context: Any, builder: Any, sig: Any, given: Sequence[Any]) -> Any:
        result = cgutils.alloca_once_value(builder, cgutils.intp_t(0))
        arrays = cgutils.unpack_tuple(builder, given[4])
        end = builder.append_basic_block("end")
        cases = builder.switch(given[0], end)
        for i, kernel in enumerate(kernels):
            block = builder.append_basic_block(kernel.__name__)
            cases.add_case(i, block)
            builder.position_at_end(block)
            compiled, rest = next(iter(kernel.overloads.values())), iter(arrays)
            others = {t: given[1], m: given[2], INT: given[3]}
            values = [
                _array(context, builder, kind, cgutils.unpack_tuple(builder, next(rest)))
                if isinstance(kind, Array)
                else others[kind]
                for kind in compiled.signature.args
            ]
            context.active_code_library.add_linking_library(compiled.library)
            returned = context.call_internal(builder, compiled.fndesc, compiled.signature, values)
            if compiled.signature.return_type != types.none:
                builder.store(returned, result)
            builder.branch(end)
        builder.position_at_end(end)
        return builder.load(result)

    return INT(number, t, m, value, operands), emit


def _compile_kernels() -> list[Any]:
    """Compiles all functions with the types of their annotations, and gives the kernels."""
    directory = jit.cache_directory()
    where = "the result cannot be kept" if directory == jit.NOWHERE else f"the result is kept in {directory}"
    # As a warning, because nothing less is shown where nobody sets up logging.
    logger.warning(
        "compiling the code that finds which tokens a grammar allows, once for each version of jsg on a machine; this "
        "takes 5 to 15 seconds of one core, and %s",
        where,
    )
    for function in jit.functions():
        function.compile(jit.signature_of(function.py_func))
        function.disable_compile()
    return jit.entries()


def read_or_compile(dispatcher: Any, wanted: Any) -> None:
    """Reads what the dispatcher has in its cache for a signature, or else compiles it.

    Before it looks into the cache, numba loads all that it knows of NumPy, and `scipy.linalg`: 0.3 s in the start of an
    engine. Only compiling needs that, and it loads it again if it is missing.
    """
    cache: Any = getattr(dispatcher, "_cache", None)
    if read := getattr(cache, "_load_overload", None):  # a version without it is slower, and as right
        cache.load_overload = read
    dispatcher.compile(wanted)
    dispatcher.disable_compile()


def signature(static: type, memory: type) -> Any:
    """The signature of `run`."""
    return INT(INT, jit.type_of(static), jit.type_of(memory), INT, *[Operand()] * jit.MAX_ARRAYS)


def run(
    number: int, t: Any, m: Any, value: int, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any
) -> int:  # `MAX_ARRAYS` arrays; numba makes a wrapper of a function with `*arrays` that takes a tuple
    """Runs the kernel with this number."""
    return _call(number, t, m, value, (a, b, c, d, e, f, g, h))  # pyright: ignore[reportCallIssue]
