"""The matrix unit of x86 processors (AMX): 16 rows, 16 columns and 32 inputs of bfloat16 in an instruction.

It has eight registers, *matrix tiles* of 16 lines of 64 bytes. An instruction adds to a tile of float32 sums the
products of a tile of rows, 32 bfloat16 each, and of a tile of columns, whose lines have two inputs of 16 columns side
by side. Numbers too small for a normal float32 count as zero. See Intel's Software Developer's Manual, volume 1,
chapter 18.
"""

import ctypes
import functools
import sys
from typing import Any

from llvmlite import binding, ir

from jsg.kernels_pallas.native.emit import BYTE, Function, Value

DEPTH = 32
"""Inputs of an instruction."""
ROWS = 16
LINE_BYTES = 64
NEEDED = ("amx-tile", "amx-bf16", "avx512f")
"""What the processor must have. Attention uses AVX-512 beside the matrix unit."""
NUM_TILES = 8
COLUMN_TILES = (6, 7)
"""The matrix tiles that have columns. The others have rows or sums."""
PALETTE, CONFIG_COLUMNS, CONFIG_ROWS = 1, 16, 48
"""The first byte of a configuration, and where it has the bytes of a line and the lines of each tile."""
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Linux gives the large registers only to processes that ask: `arch_prctl(ARCH_REQ_XCOMP_PERM, ...)`."""


@functools.cache
def is_available() -> bool:
    """Whether the processor has a matrix unit for bfloat16 and the system lets this process use it."""
    features = binding.get_host_cpu_features()
    if sys.platform != "linux" or not all(features.get(name) for name in NEEDED):
        return False
    return ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def configure(function: Function, num_rows: Value) -> None:
    """Begins to use the unit, for at most `ROWS` rows at a time. It must be released."""
    config = function.buffer(LINE_BYTES)
    for offset in range(0, LINE_BYTES, 8):
        function.store(function.constant(0), config, offset)
    function.store(function.byte(function.constant(PALETTE)), config)
    for tile in range(NUM_TILES):
        lines = function.constant(ROWS) if tile in COLUMN_TILES else function.smaller(num_rows, function.constant(ROWS))
        function.store(function.byte(function.constant(LINE_BYTES)), config, CONFIG_COLUMNS + 2 * tile)
        function.store(function.byte(lines), config, CONFIG_ROWS + tile)
    _emit(function, "ldtilecfg", config.ir)


def release(function: Function) -> None:
    """Ends the use of the unit, whose registers then need not be saved when threads change."""
    _emit(function, "tilerelease")


def clear(function: Function, tile: int) -> None:
    """Sets a matrix tile to zero.

    The processor renames matrix tiles, and one that is cleared needs no register. With the other thread of a core busy
    there are hardly more than eight. So what is cleared after its last use lets the next loads begin: an instruction
    on 2 by 2 tiles took 15 ns and not 28 there, and 6 in any case on a core of its own (Xeon, 2026-11-27).
    """
    _emit(function, "tilezero", _number(tile))


def load(function: Function, tile: int, address: Value, stride: Value | int) -> None:
    """Loads a matrix tile, whose lines lie `stride` bytes apart."""
    _move(function, "tileloadd64", tile, address, stride)


def store(function: Function, tile: int, address: Value, stride: Value | int) -> None:
    """Writes a matrix tile, to lines `stride` bytes apart."""
    _move(function, "tilestored64", tile, address, stride)


def multiply(function: Function, sums: int, rows: int, columns: int) -> None:
    """Adds the products of two matrix tiles to a third."""
    _emit(function, "tdpbf16ps", *map(_number, (sums, rows, columns)))


def _move(function: Function, name: str, tile: int, address: Value, stride: Value | int) -> None:
    stride = stride if isinstance(stride, Value) else function.constant(stride)
    _emit(function, name, _number(tile), address.ir, stride.ir)


def _number(tile: int) -> ir.Constant:
    return ir.Constant(BYTE, tile)


def _emit(function: Function, name: str, *arguments: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    function.builder.call(function.external(f"llvm.x86.{name}", kind), arguments)
