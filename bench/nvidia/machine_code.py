"""Finds the machine code inside a serialized executable, and counts its instructions.

XLA writes a compiled GPU program as a Riegeli file. Snappy compresses its records, but not from JAX 0.12 on. One of
them has the code: an ELF file for CUDA (a "cubin") for each kernel. Finding the code needs no tool; counting its
instructions needs `nvdisasm`.
"""

import pathlib
import re
import struct
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator

RIEGELI_SIGNATURE = bytes.fromhex("83af70d10d884a3f")
RIEGELI_BLOCK = 2**16
RIEGELI_BLOCK_HEADER = 24
RIEGELI_CHUNK_HEADER = 40
ELF_MAGIC = b"\x7fELF"
ELF_MACHINE_CUDA = 190
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.x]*)")
"""A line of nvdisasm: the address, an optional predicate, and the instruction."""


def instructions(executable: bytes, kernel: str, nvdisasm: pathlib.Path) -> Counter[str]:
    """How often each instruction, with its modifiers, occurs in a kernel of a serialized executable.

    Raises:
        ValueError: None was read, so nothing can be said of the kernel.
    """
    of_kernel = re.compile(rf"\0(\.text\.{re.escape(kernel)}(?:__\d+)?)\0".encode())
    found = next(
        ((cubin, name[1].decode()) for cubin in _cubins(executable) if (name := of_kernel.search(cubin))), None
    )
    if found is None:
        raise ValueError(f"the executable must have a kernel {kernel}, but none of its files for CUDA has")
    code, section = found
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return count(disassembled(pathlib.Path(file.name), nvdisasm), section)


def disassembled(cubin: pathlib.Path, nvdisasm: pathlib.Path) -> str:
    """What `nvdisasm` prints of an ELF file for CUDA."""
    command = [nvdisasm, "--no-dataflow", cubin]  # its analysis of branches takes a third of the time
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def count(listing: str, section: str) -> Counter[str]:
    """How often each instruction occurs in a section of what `nvdisasm` prints.

    Raises:
        ValueError: None was read.
    """
    counts: Counter[str] = Counter()
    is_inside = False
    for line in listing.splitlines():
        if re.match(r"\s*\.section\s", line):  # below sm_90, ".sectioninfo" stands inside of a section
            is_inside = f"{section}," in line
        elif is_inside and (found := INSTRUCTION.search(line)):
            counts[found[1]] += 1
    if not counts:
        raise ValueError(f"the section {section} must have instructions, but none was read")
    return counts


def _cubins(executable: bytes) -> Iterator[bytes]:
    """Every ELF file for CUDA, cut to the length that its own headers give."""
    for record in _riegeli_records(executable[executable.index(RIEGELI_SIGNATURE) :]):
        start = record.find(ELF_MAGIC)
        while start >= 0:
            (machine,) = struct.unpack_from("<H", record, start + 18)
            program_headers, section_headers = struct.unpack_from("<QQ", record, start + 32)
            sizes = struct.unpack_from("<HHHH", record, start + 54)
            length = max(program_headers + sizes[0] * sizes[1], section_headers + sizes[2] * sizes[3])
            if machine == ELF_MACHINE_CUDA:
                yield record[start : start + length]
            start = record.find(ELF_MAGIC, start + length)


def _riegeli_records(file: bytes) -> Iterator[bytes]:
    """The records of a Riegeli file, and of the Riegeli files among its records.

    A header of 24 bytes interrupts the file at every block. Between the headers are chunks. A chunk of records has the
    letter of the compression (zero for none), then the sizes of its records, then the records one after another; both
    parts are compressed.
    """
    blocks = range(0, len(file), RIEGELI_BLOCK)
    stream = b"".join(file[at + RIEGELI_BLOCK_HEADER : at + RIEGELI_BLOCK] for at in blocks)
    at = 0
    while at < len(stream):
        data_size, kind, num_records = struct.unpack_from("<8xQ8xcI3x", stream, at)
        data = stream[at + RIEGELI_CHUNK_HEADER : at + RIEGELI_CHUNK_HEADER + data_size]
        at += RIEGELI_CHUNK_HEADER + data_size
        if kind != b"r":
            continue
        length, start = varint(data, 1)
        sizes, values = (
            _decompressed(part, data[:1]) for part in (data[start : start + length], data[start + length :])
        )
        place = first = 0
        for _ in range(num_records):
            size, place = varint(sizes, place)
            record, first = values[first : first + size], first + size
            if record.startswith(RIEGELI_SIGNATURE):
                yield from _riegeli_records(record)
            else:
                yield record


def _decompressed(part: bytes, compression: bytes) -> bytes:
    """The content of a part of a chunk. Compressed, it has a length, which Snappy's header repeats, and a stream."""
    assert compression in (b"\0", b"s"), f"records are expected as they are or by Snappy, but are by {compression!r}"
    return part if compression == b"\0" else _snappy(part, varint(part, 0)[1])


def _snappy(data: bytes, at: int) -> bytes:
    """The content of the raw Snappy stream that starts at `at`: literals, and copies of earlier output."""
    size, at = varint(data, at)
    out = bytearray()
    while len(out) < size:
        tag, at = data[at], at + 1
        if tag & 3 == 0:
            length, wide = tag >> 2, max((tag >> 2) - 59, 0)  # lengths above 60 follow in 1 to 4 bytes
            if wide:
                length, at = int.from_bytes(data[at : at + wide], "little"), at + wide
            out += data[at : at + length + 1]
            at += length + 1
            continue
        if tag & 3 == 1:
            length, offset, at = (tag >> 2 & 7) + 4, (tag >> 5) << 8 | data[at], at + 1
        else:
            wide = 2 if tag & 3 == 2 else 4
            length, offset, at = (tag >> 2) + 1, int.from_bytes(data[at : at + wide], "little"), at + wide
        for _ in range(length):  # byte by byte, because a copy may read what it has just written
            out.append(out[-offset])
    return bytes(out)


def varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of 7 bits, lowest first, and the place behind it."""
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
