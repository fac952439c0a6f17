"""The machine code inside a serialized executable, and what instructions it is made of.

XLA writes a compiled GPU program as a Riegeli file of Snappy-compressed records. In one of them lies the code: an ELF
file for CUDA (a "cubin") for each kernel. To find it takes no tool; to tell its instructions apart takes `nvdisasm`.
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
"""A line of nvdisasm: address, perhaps a predicate, instruction."""


def instructions(executable: bytes, kernel: str, nvdisasm: pathlib.Path) -> Counter[str]:
    """How often each instruction, named with its modifiers, stands in a kernel of a serialized executable."""
    section = f".text.{kernel}"
    code = next(cubin for cubin in _cubins(executable) if f"{section}\0".encode() in cubin)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        text = subprocess.run([nvdisasm, file.name], capture_output=True, text=True, check=True).stdout
    counts: Counter[str] = Counter()
    is_inside = False
    for line in text.splitlines():
        if line.lstrip().startswith(".section"):
            is_inside = f"{section}," in line
        elif is_inside and (found := INSTRUCTION.search(line)):
            counts[found[1]] += 1
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
    """The records of a Riegeli file, and of the Riegeli files that are records of it.

    A header of 24 bytes interrupts the file at every block. Between them are chunks; one of records holds the letter of
    the compression, the sizes of its records as numbers, and the records one after another, each part compressed.
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
        assert data[:1] == b"s", f"records compressed by Snappy are expected, but these are by {data[:1]!r}"
        length, start = _varint(data, 1)
        sizes, values = _decompressed(data[start : start + length]), _decompressed(data[start + length :])
        place = first = 0
        for _ in range(num_records):
            size, place = _varint(sizes, place)
            record, first = values[first : first + size], first + size
            if record.startswith(RIEGELI_SIGNATURE):
                yield from _riegeli_records(record)
            else:
                yield record


def _decompressed(part: bytes) -> bytes:
    """A compressed part of a chunk: the length of its content, which Snappy's own header repeats, and a stream."""
    return _snappy(part, _varint(part, 0)[1])


def _snappy(data: bytes, at: int) -> bytes:
    """The raw Snappy stream that starts at `at`: literals, and copies of what was put out before."""
    size, at = _varint(data, at)
    out = bytearray()
    while len(out) < size:
        tag, at = data[at], at + 1
        if tag & 3 == 0:
            length, wide = tag >> 2, max((tag >> 2) - 59, 0)  # lengths above 60 stand in 1 to 4 bytes of their own
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
        for _ in range(length):  # one by one: a copy may read what it has just written
            out.append(out[-offset])
    return bytes(out)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of 7 bits, lowest first; and where it ends."""
    value = shift = 0
    while True:
        byte, at = data[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
