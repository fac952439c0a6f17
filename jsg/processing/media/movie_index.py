"""Counts what the index of an MP4 or QuickTime file declares (ISO/IEC 14496-12), before it is built in memory.

When a file is opened, FFmpeg allocates about 35 bytes for every sample that the index declares, whether the sample
exists or not. It reads tables anywhere, even in boxes that should hold none. So the tables are searched for by name
everywhere but in the frames, and none can be hidden. (Random bytes contain one of the names once in about 350 MB; an
index has some hundred KB.)
"""

import re
import struct

from jsg.errors import RequestError

MAX_INDEX_BYTES = 2**23
"""The most bytes that are not frames. Pictures of the cover and other extras count too."""
MAX_SAMPLES = 2**20
"""The most samples of all tracks, multiplied by the length of the longest edit list, which can repeat them. An hour of
compressed sound has 170,000; sound that is not compressed has tens of thousands a second."""
MAX_CHUNKED_SAMPLES = 2**27
"""The most chunks times the samples of the largest chunk. Of sound that is not compressed, one entry has at least 160
samples."""
MAX_FRAGMENTS = 2**15
"""The most fragments. FFmpeg keeps something of every track for each of them."""

_TABLES = re.compile(rb"stsz|stz2|trun|stco|co64|stsc|elst|moof|sidx|cmov|senc|saiz")
_LARGE = b"\0\0\0\1"  # the size of such a box comes after its name


def checked_movie(data: bytes) -> bytes:
    """The file, safe to open: an index of fragments is disabled, because it may point into the frames.

    Raises:
        RequestError: It declares more samples, chunks or fragments than a long film has, or is packed or encrypted.
    """
    samples = chunks = largest_chunk = edits = fragments = num_bytes = 0
    pointers: list[int] = []
    for start, end in _outside_frames(data):
        num_bytes += end - start
        _require(num_bytes <= MAX_INDEX_BYTES, f"{MAX_INDEX_BYTES} bytes beside its frames")
        for match in _TABLES.finditer(data, start, end):
            is_large = data[match.start() - 4 : match.start()] == _LARGE
            place = match.end() + (12 if is_large else 4)  # after version and flags
            match match[0]:
                case b"stsz" | b"stz2":
                    samples += _number(data, place + 4)
                case b"trun":
                    samples += _number(data, place)
                case b"stco" | b"co64":
                    chunks += _number(data, place)
                case b"stsc":
                    largest_chunk = max(largest_chunk, _largest_chunk(data, place))
                case b"elst":
                    edits = max(edits, _number(data, place))
                case b"moof":
                    fragments += 1
                case b"sidx":
                    pointers.append(match.start())
                case _:
                    raise RequestError("a video must not be packed or encrypted, but this one is; encode it again")
    _require(max(samples, chunks) * max(edits, 1) <= MAX_SAMPLES, f"{MAX_SAMPLES} samples")
    _require(chunks * largest_chunk <= MAX_CHUNKED_SAMPLES, f"{MAX_CHUNKED_SAMPLES} samples in its chunks")
    _require(fragments <= MAX_FRAGMENTS, f"{MAX_FRAGMENTS} fragments")
    if not pointers:
        return data
    changed = bytearray(data)
    for place in pointers:
        changed[place : place + 4] = b"skip"  # the name of a box that is not read
    return bytes(changed)


def _outside_frames(data: bytes) -> list[tuple[int, int]]:
    """The spans without frames. Boxes are measured as by FFmpeg, and all after the box where it stops is one span."""
    parts, start, place = [], 0, 0
    while place + 8 <= len(data):
        size, name = struct.unpack_from(">I4s", data, place)
        header = 8
        if size == 1 and place + 16 <= len(data):
            size, header = struct.unpack_from(">Q", data, place + 8)[0], 16
        if size == 0:  # up to the end of the file
            size = len(data) - place
        if size < header:
            break
        if name == b"mdat":
            parts.append((start, place + header))
            start = min(place + size, len(data))
        place += size
    return [*parts, (start, len(data))]


def _number(data: bytes, place: int) -> int:
    """The number of 32 bits at a place. Past the end of the file, where no table can be, it is smaller."""
    return int.from_bytes(data[place : place + 4])


def _largest_chunk(data: bytes, place: int) -> int:
    """The most samples that an entry of `stsc` gives to a chunk."""
    num_entries = min(_number(data, place), (len(data) - place - 4) // 12)
    entries = memoryview(data)[place + 4 : place + 4 + 12 * max(num_entries, 0)]
    return max((samples for _, samples, _ in struct.iter_unpack(">III", entries)), default=0)


def _require(ok: bool, limit: str) -> None:
    if not ok:
        raise RequestError(
            f"a video may declare at most {limit}, but this one has more; send a shorter part, or leave out its sound"
        )
