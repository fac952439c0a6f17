"""Reads the text of an optimised program: which operation makes what."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterable, Iterator

ITEM_BITS = {
    **{"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8, "s16": 16, "u16": 16, "bf16": 16},
    **{"f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64},
}
VIEWS = {"parameter", "bitcast", "tuple", "get-tuple-element"}
"""Operations that write nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """One line of a program.

    Attributes:
        computation: The name of the function that it is in.
        name: Its own name, without the number at the end.
        operation: What it does.
        text: Its result and the operation.
        shapes: The shapes of its results.
        num_bytes: The bytes of the largest of them.
        line: All of it.
    """

    computation: str
    name: str
    operation: str
    text: str
    shapes: tuple[tuple[int, ...], ...]
    num_bytes: int
    line: str


def array_bytes(dtype: str, shape: Iterable[int]) -> int:
    """The bytes of an array of this type, as XLA writes it."""
    return ITEM_BITS[dtype] * math.prod(shape) // 8


def operations(hlo: str) -> Iterator[Operation]:
    """Every operation of an optimised program, in the order of the text."""
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%(\S+) \(", line):
            computation = header[1]
        elif found := re.match(r" +(?:ROOT )?%(\S+?)(?:\.\d+)* = (.*?) ([a-z][a-z-]*)\(", line):
            name, result, operation = found.groups()
            arrays = re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", result)
            shapes = tuple(tuple(map(int, filter(None, dims.split(",")))) for _, dims in arrays)
            sizes = [array_bytes(dtype, shape) for (dtype, _), shape in zip(arrays, shapes, strict=True)]
            largest = max(sizes, default=0)
            yield Operation(computation, name, operation, f"{result} {operation}", shapes, largest, line)


def makers_of(hlo: str, elements: int) -> set[str]:
    """The operations, also inside fusions, whose result is an array of `elements` numbers or more."""
    return {made.operation for made in operations(hlo) if any(math.prod(s) >= elements for s in made.shapes)}


def writers_of(hlo: str, matrices: Collection[tuple[int, int]]) -> list[str]:
    """The operations that write one of these matrices, or its transpose, to memory.

    An array is a matrix if its axes, in their order, can be split into rows and columns of these sizes. Results inside
    a fusion are not written to memory, because only a block of them exists at a time.
    """
    wanted = {frozenset(matrix) for matrix in matrices}
    return [
        made.text
        for made in writers(hlo)
        if any(frozenset(cut) in wanted for shape in made.shapes for cut in _cuts(shape))
    ]


def writers(hlo: str, num_bytes: int = 0) -> list[Operation]:
    """The operations outside of fusions that write an array of so many bytes or more."""
    fused = set(re.findall(r" fusion\(.*? calls=%([^\s,]+)", hlo))
    return [
        made
        for made in operations(hlo)
        if made.computation not in fused and made.operation not in VIEWS and made.num_bytes >= num_bytes
    ]


def _cuts(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The (rows, columns) of each way in which an array can be read as a matrix without moving data."""
    for axis in range(1, len(shape)):
        yield math.prod(shape[:axis]), math.prod(shape[axis:])
