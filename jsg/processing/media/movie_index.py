"""What the index of an MP4 or QuickTime file declares (ISO/IEC 14496-12), counted before anybody builds it in memory.

FFmpeg makes some 35 bytes of every sample that an index counts as soon as a file is opened, whether the sample is there
or not. It heeds tables wherever they stand, even in boxes that should hold none. So they are not looked up from box to
box but searched for by name, everywhere but in the frames themselves, and nothing can be hidden. (Random bytes hold one
of the names once in some 350 MB; an index has some hundred KB.)
"""

import re
import struct

from jsg.errors import RequestError

MAX_INDEX_BYTES = 2**23
"""All that is not frames: pictures of the cover and other extras count."""
MAX_SAMPLES = 2**20
"""Of all tracks, each as often as the longest list of edits can repeat it. An hour of sound has 170,000, unless it is
not compressed: then it has tens of thousands a second."""
MAX_CHUNKED_SAMPLES = 2**27
"""Chunks, times the samples of the largest one: of sound that is not compressed, at least 160 make one entry."""
MAX_FRAGMENTS = 2**15
"""FFmpeg notes something of every track for each."""

_TABLES = re.compile(rb"stsz|stz2|trun|stco|co64|stsc|elst|moof|sidx|cmov|senc|saiz")
_LARGE = b"\0\0\0\1"  # the size of such a box stands behind its name


def checked_movie(data: bytes) -> bytes:
    """A file that is safe to open: the same, but for an index of fragments, which may point into the frames.

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
            place = match.end() + (12 if is_large else 4)  # behind version and flags
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
    return _without(data, pointers) if pointers else data


def _outside_frames(data: bytes) -> list[tuple[int, int]]:
    """From where to where there are no frames. Boxes are measured as FFmpeg does; where it stops, the rest counts."""
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
    """The number of 32 bits there; behind the end, where no table is either, it is smaller."""
    return int.from_bytes(data[place : place + 4])


def _largest_chunk(data: bytes, place: int) -> int:
    """The most samples that an entry of `stsc` gives to a chunk."""
    num_entries = min(_number(data, place), (len(data) - place - 4) // 12)
    entries = memoryview(data)[place + 4 : place + 4 + 12 * max(num_entries, 0)]
    return max((samples for _, samples, _ in struct.iter_unpack(">III", entries)), default=0)


def _without(data: bytes, pointers: list[int]) -> bytes:
    """The file with the boxes whose names stand there renamed to one that is skipped."""
    changed = bytearray(data)
    for place in pointers:
        changed[place : place + 4] = b"skip"
    return bytes(changed)


def _require(ok: bool, limit: str) -> None:
    if not ok:
        raise RequestError(
            f"a video may declare at most {limit}, but this one has more; send a shorter part, or leave out its sound"
        )
