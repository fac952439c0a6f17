"""Reads what the file of a picture declares without decoding it, and takes out the parts that make no pixels.

PNG: W3C PNG specification, third edition. JPEG: ITU-T T.81, annex B. WebP: RFC 9649. GIF: GIF89a specification. EXIF:
CIPA DC-008.

Decoders trust such files: they unpack every text, join every piece of a profile and step through empty parts. So a
decoder gets only the parts that make the pixels, and the functions here examine each part once.
"""

import dataclasses
import re
import struct
from typing import Literal

from jsg.errors import RequestError

Format = Literal["PNG", "JPEG", "WEBP", "GIF"]

MAX_JPEG_SCANS = 64
"""A decoder goes over all pixels of a progressive JPEG once per scan. An encoder makes about ten; a file could hold one
scan for each dozen of its bytes."""
MAX_PARTS = 2**14
"""The most chunks, segments and blocks of one file. An encoder writes thousands of bytes in each and a hostile file
none, and each costs us and the decoder some microseconds."""
MAX_EXIF_TAGS = 1000

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_SHOWN_PNG_CHUNKS = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # 00 is data, FF fills, D0–D7 restart
_JPEG_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_SHOWN_JPEG_SEGMENTS = _JPEG_FRAMES | {0xC4, 0xCC, 0xDB, 0xDD, 0xE0, 0xEE}  # tables, restarts, the kind of colours
_JPEG_FILL = b"\xff" * 2**16  # longer than any segment, so it is only fill, which decoders go over again and again
_EXIF_PREFIX = b"Exif\0\0"
_ORIENTATION_TAG = 0x0112
_EXIF_NUMBERS = {3: "H", 4: "I"}


@dataclasses.dataclass(frozen=True, slots=True)
class Declared:
    """What a file declares.

    Attributes:
        format: Its format, by its bytes.
        height: In pixels, before any rotation.
        width: The same.
        orientation: EXIF's number of how the picture must be turned, 1 to 8; 0 if the file has none.
        shown: The file with only the parts that make the pixels of its first image.
    """

    format: Format
    height: int
    width: int
    orientation: int
    shown: bytes


def read_header(data: bytes) -> Declared:
    """What a picture's file declares. Its bytes alone decide its type.

    Raises:
        RequestError: The file is no PNG, JPEG, WebP or GIF, its header is damaged, or it has too many parts or scans.
    """
    if data.startswith(_PNG_SIGNATURE):
        name, read = "PNG", _read_png
    elif data.startswith(b"\xff\xd8\xff"):
        name, read = "JPEG", _read_jpeg
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        name, read = "WEBP", _read_webp
    elif data.startswith((b"GIF87a", b"GIF89a")):
        name, read = "GIF", _read_gif
    else:
        raise RequestError(
            f"a picture must be PNG, JPEG, WebP or GIF, but its file begins with {data[:8]!r}; convert it"
        )
    try:
        return read(data)
    except (struct.error, IndexError):
        raise damaged(name) from None


def is_still(data: bytes) -> bool:
    """Whether a file is a single picture, by its first bytes. A GIF may be a video, so it is not."""
    return data.startswith((_PNG_SIGNATURE, b"\xff\xd8\xff")) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")


def damaged(format: Format) -> RequestError:
    """The error for a file that cannot be read to its end."""
    return RequestError(f"a picture must be a whole file, but this {format} is cut off or damaged; send it again")


def _too_many_parts(format: Format) -> RequestError:
    return RequestError(
        f"a picture may have at most {MAX_PARTS} chunks, segments or blocks, but this {format} has more; save it again"
    )


def _read_png(data: bytes) -> Declared:
    """Leaves texts and colour profiles out, which are compressed and can unpack to gigabytes."""
    name, width, height = struct.unpack_from(">4sII", data, 12)
    if name != b"IHDR":
        raise damaged("PNG")
    kept, exif, place = [_PNG_SIGNATURE], b"", len(_PNG_SIGNATURE)
    for _ in range(MAX_PARTS):
        length, name = struct.unpack_from(">I4s", data, place)
        end = place + 12 + length
        if name in _SHOWN_PNG_CHUNKS:
            kept.append(data[place:end])
        elif name == b"eXIf" and not exif:
            exif = data[place + 8 : end - 4]
        if name == b"IEND" and end <= len(data):
            return Declared("PNG", height, width, _orientation(exif), b"".join(kept))
        place = end
    raise _too_many_parts("PNG")


def _read_jpeg(data: bytes) -> Declared:
    """Takes the size from the first frame header. Leaves out segments before the first scan, and all after the end."""
    size, exif, num_scans, first_scan = None, b"", 0, 0
    kept, place, end = [data[:2]], 2, len(data)
    for _ in range(MAX_PARTS):
        match = _JPEG_MARKER.search(data, place)
        if match is None:
            break
        marker = data[match.start() + 1]
        if marker == 0xD9:
            end = match.end()
            break
        length = struct.unpack_from(">H", data, match.end())[0] if marker != 0x01 else 0
        place = match.end() + length
        if marker in _JPEG_FRAMES and size is None:
            size = struct.unpack_from(">HH", data, match.end() + 3)
        if marker == 0xDA:
            num_scans += 1
            first_scan = first_scan or match.start()
        elif not first_scan and marker in _SHOWN_JPEG_SEGMENTS:
            kept.append(data[match.start() : place])
        elif marker == 0xE1 and not exif and data.startswith(_EXIF_PREFIX, match.end() + 2):
            exif = data[match.end() + 2 : place]
    else:
        raise _too_many_parts("JPEG")
    if size is None or not first_scan or data.find(_JPEG_FILL, first_scan, end) >= 0:
        raise damaged("JPEG")
    if num_scans > MAX_JPEG_SCANS:
        raise RequestError(
            f"a JPEG may have at most {MAX_JPEG_SCANS} scans, but this one has {num_scans}; save it again"
        )
    return Declared("JPEG", *size, _orientation(exif), b"".join([*kept, data[first_scan:end]]))


def _read_webp(data: bytes) -> Declared:
    """Leaves nothing out, because the decoder of WebP examines each chunk once too."""
    match data[12:16]:
        case b"VP8X":
            width, height = (int.from_bytes(data[place : place + 3], "little") + 1 for place in (24, 27))
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        case b"VP8 ":
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
        case _:
            raise damaged("WEBP")
    exif, place, end = b"", 12, min(len(data), 8 + int.from_bytes(data[4:8], "little"))
    for _ in range(MAX_PARTS):
        if place + 8 > end:
            return Declared("WEBP", height, width, _orientation(exif), data)
        name, length = struct.unpack_from("<4sI", data, place)
        if name == b"EXIF" and not exif:
            exif = data[place + 8 : place + 8 + length]
        place += 8 + length + length % 2
    raise _too_many_parts("WEBP")


def _read_gif(data: bytes) -> Declared:
    """The size is the screen's, or larger if the first image reaches beyond it. Comments are left out."""
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + (3 << ((flags & 7) + 1) if flags & 0x80 else 0)  # after the table of colours
    kept, num_parts = [data[:place]], 0
    while data[place] == 0x21:  # an extension: two bytes, then blocks that begin with their length, the last one empty
        start, place = place, place + 2
        is_last = False
        while not is_last:
            num_parts += 1
            if num_parts > MAX_PARTS:
                raise _too_many_parts("GIF")
            is_last = not data[place]
            place += 1 + data[place]
        if data[start + 1] == 0xF9:  # names the background colour
            kept.append(data[start:place])
    if data[place] != 0x2C:
        raise damaged("GIF")
    left, top, image_width, image_height = struct.unpack_from("<HHHH", data, place + 1)
    height, width = max(height, top + image_height), max(width, left + image_width)
    return Declared("GIF", height, width, 0, b"".join([*kept, data[place:]]))


def _orientation(exif: bytes) -> int:
    """The orientation in EXIF's first directory; 0 for a damaged directory, because the picture is still good."""
    data = exif.removeprefix(_EXIF_PREFIX)
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(data[:4])
    if order is None:
        return 0
    try:
        (place,) = struct.unpack_from(f"{order}I", data, 4)
        (num_tags,) = struct.unpack_from(f"{order}H", data, place)
        for index in range(min(num_tags, MAX_EXIF_TAGS)):
            entry = place + 2 + 12 * index
            tag, number, count = struct.unpack_from(f"{order}HHI", data, entry)
            if tag == _ORIENTATION_TAG and number in _EXIF_NUMBERS and count == 1:
                return struct.unpack_from(f"{order}{_EXIF_NUMBERS[number]}", data, entry + 8)[0]
    except struct.error:
        pass
    return 0
