"""Reads the text of an optimised program: which operation makes what."""

import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

ITEM_BITS = {
    **{"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "f8e4m3fn": 8, "f8e5m2": 8, "s16": 16, "u16": 16, "bf16": 16},
    **{"f16": 16, "s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "token": 0},
}
VIEWS = {"parameter", "bitcast", "tuple", "get-tuple-element"}
"""Operations that write nothing."""
Matrices = Collection[tuple[int, int]]
"""Kernels, each as (inputs, outputs)."""


@dataclass(frozen=True, slots=True)
class Array:
    """A result.

    Attributes:
        is_in_vmem: Whether it lies in the vector memory of a TPU, as a copy of the kernel for the next product does.
    """

    dtype: str
    shape: tuple[int, ...]
    is_in_vmem: bool = False

    @property
    def num_bytes(self) -> int:
        """Its bytes."""
        return ITEM_BITS[self.dtype] * math.prod(self.shape) // 8

    def is_one_of(self, matrices: Matrices) -> bool:
        """Whether its axes, in their order, can be split into rows and columns of a matrix, or of its transpose."""
        return any(
            (math.prod(self.shape[:axis]), math.prod(self.shape[axis:])) in matrices
            or (math.prod(self.shape[axis:]), math.prod(self.shape[:axis])) in matrices
            for axis in range(1, len(self.shape))
        )


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of a program.

    Attributes:
        computation: The name of the function that it is in.
        name: Its own name.
        operation: What it does.
        text: Its result and the operation.
        arrays: Its results.
    """

    computation: str
    name: str
    operation: str
    text: str
    arrays: tuple[Array, ...]


def arrays_in(text: str) -> tuple[Array, ...]:
    """Every array whose type is in a text."""
    found = re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^{}]*S\(1\)\})?", text)
    return tuple(
        Array(dtype, tuple(map(int, filter(None, dims.split(",")))), bool(vmem)) for dtype, dims, vmem in found
    )


def operations(hlo: str) -> Iterator[Operation]:
    """Every operation of an optimised program, in the order of the text."""
    computation = ""
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%(\S+) \(", line):
            computation = header[1]
        elif found := re.match(r" +(?:ROOT )?%(\S+) = (.*?) ([a-z][a-z-]*)\(", line):
            name, result, operation = found.groups()
            yield Operation(computation, name, operation, f"{result} {operation}", arrays_in(result))


def makers_of(hlo: str, elements: int) -> set[str]:
    """The operations, also inside fusions, whose result is an array of `elements` numbers or more."""
    return {made.operation for made in operations(hlo) if any(math.prod(a.shape) >= elements for a in made.arrays)}


def writers(hlo: str) -> Iterator[Operation]:
    """The operations that write to memory. Those inside a fusion do not, because a block of them exists at a time.

    The start of one that goes on beside others has its operands among its results, and its end has what it writes.
    """
    fused = set(re.findall(r" fusion\(.*? calls=%([^\s,]+)", hlo))
    return (
        made
        for made in operations(hlo)
        if made.computation not in fused and made.operation not in VIEWS and not made.operation.endswith("-start")
    )


def writers_of(hlo: str, matrices: Matrices) -> list[str]:
    """The operations that write one of these matrices, or its transpose, to memory."""
    return [made.text for made in writers(hlo) if any(array.is_one_of(matrices) for array in made.arrays)]
