"""Pictures and videos of a program: the bytes of their files, and the type of these bytes."""

import base64
import binascii
import io
import os
import pathlib
import urllib.parse
from typing import Any

from jsg.errors import RequestError
from jsg.lang.words.ir import Image, Video
from jsg.processing.parts import MediaFile

FRAMES_TYPE = "video/jpeg"
"""The media type, which other servers know too, of a list of frames, whatever kind of pictures they are."""


def image_of(source: Any) -> Image:
    """A picture, as `read_media` reads it."""
    data = read_media(source, "image")
    return Image(data, image_type(data))


def video_of(source: Any, num_frames: int) -> Video:
    """A video, as `read_video` reads it, of which the model sees `num_frames` frames."""
    data, media_type = read_video(source)
    return Video(data, num_frames, media_type)


def read_media(source: Any, kind: str) -> bytes:
    """Gives the bytes of the file of a picture or video.

    Args:
        source: A path, bytes, a `data:` URL, or a picture of PIL (which becomes a PNG).
        kind: "image" or "video", for messages.

    Raises:
        RequestError: The source is none of these, a URL of another kind, or a `data:` URL that is not well-formed.
        OSError: The file cannot be read.
    """
    match source:
        case bytes() | bytearray() | memoryview():
            data = bytes(source)
        case str() if source.startswith("data:"):
            data = _data_of_url(source, kind)
        case str() if "://" in source:
            raise RequestError(
                f"{kind} takes a path, bytes or a data: URL, but got the URL {source[:60]!r}; fetch it first"
            )
        case str() | os.PathLike():
            data = pathlib.Path(source).read_bytes()
        case _ if kind == "image" and hasattr(source, "save") and hasattr(source, "mode"):
            file = io.BytesIO()
            source.save(file, format="PNG")
            data = file.getvalue()
        case _:
            raise RequestError(f"{kind} takes a path, bytes or a data: URL, but got {type(source).__name__}")
    if not data:
        raise RequestError(f"{kind} needs a file with something in it, but it is empty")
    return data


def read_video(source: Any) -> tuple[MediaFile, str]:
    """Gives the file of a video, or the files of its frames where `source` is a list of pictures, and the media type.

    Args:
        source: A source of `read_media`, or a list of sources of pictures.

    Raises:
        RequestError, OSError: As `read_media` does, or the list is empty, or an item is no picture.
    """
    if not isinstance(source, list | tuple):
        data = read_media(source, "video")
        return data, video_type(data)
    if not source:
        raise RequestError("video takes a list of at least one frame, but got an empty one")
    frames = tuple(read_media(frame, "image") for frame in source)
    for frame in frames:
        image_type(frame)
    return frames, FRAMES_TYPE


def image_type(data: bytes) -> str:
    """Gives the media type of a picture by its first bytes. Raises RequestError for an unknown kind."""
    for start, media_type in _IMAGE_STARTS:
        if data.startswith(start):
            return media_type
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    if data[4:8] == b"ftyp" and data[8:12] in (b"avif", b"heic", b"mif1"):
        return "image/heic" if data[8:12] == b"heic" else "image/avif"
    raise RequestError(f"image knows PNG, JPEG, GIF, WebP, BMP, TIFF and AVIF, but the file begins with {data[:8]!r}")


def video_type(data: bytes) -> str:
    """Gives the media type of a video by its first bytes. Raises RequestError for an unknown kind."""
    if data[4:8] == b"ftyp":
        return "video/quicktime" if data[8:10] == b"qt" else "video/mp4"
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return "video/webm" if b"webm" in data[:64] else "video/x-matroska"
    if data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        return "video/x-msvideo"
    if data.startswith(b"OggS"):
        return "video/ogg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    raise RequestError(
        f"video knows MP4, QuickTime, WebM, Matroska, AVI, Ogg and GIF, but the file begins with {data[:8]!r}"
    )


_IMAGE_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
)


def _data_of_url(url: str, kind: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma:
        raise RequestError(f"a data: URL of {kind} is written data:TYPE;base64,DATA, but it has no comma")
    if not head.endswith(";base64"):
        return urllib.parse.unquote_to_bytes(body)
    try:
        return base64.b64decode(urllib.parse.unquote(body), validate=True)
    except binascii.Error as error:
        raise RequestError(f"the data: URL of {kind} is not base64: {error}") from None
