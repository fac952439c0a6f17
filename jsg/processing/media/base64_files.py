"""Files in JSON: in base64 (RFC 4648), or in `data:` URLs (RFC 2397) as chat APIs take them.

The frames of a video may be in place of its file, each as the file of a picture, with commas between them. Base64
has no commas.
"""

import base64
import binascii

from jsg.errors import RequestError
from jsg.processing.parts import MediaFile, MediaKind

MAX_HEAD = 256
"""The most characters of a `data:` URL in front of the comma."""
MAX_FRAMES = 4096
"""The most frames of a video, whether a number asks for them or they come one by one."""

_NO_LIMIT = 2**62
_NAMES: dict[MediaKind, str] = {"image": "a picture", "video": "a video"}


def write_base64(data: MediaFile) -> str:
    """The text that `read_base64` reads."""
    files = (data,) if isinstance(data, bytes) else data
    return ",".join(base64.b64encode(file).decode("ascii") for file in files)


def write_data_url(data: MediaFile, media_type: str) -> str:
    """The URL that `read_data_url` reads."""
    return f"data:{media_type};base64,{write_base64(data)}"


def read_data_url(url: str, kind: MediaKind, max_bytes: int = _NO_LIMIT) -> MediaFile:
    """The file inside `data:[type][;parameter=value];base64,DATA`. The type is ignored.

    Args:
        url: Begins with `data:`, in upper or lower case.
        kind: Only a video may be frames.
        max_bytes: The most bytes of all files in it, which is checked before anything is decoded.

    Raises:
        RequestError: The URL does not have this form, or as `read_base64`.
    """
    head, comma, _ = url[: MAX_HEAD + 1].partition(",")
    if not comma or head[:5].lower() != "data:" or not head.lower().endswith(";base64"):
        raise RequestError(f"a data: URL must be data:TYPE;base64,DATA, but begins with {head[:40]!r}; encode the file")
    return read_base64(url[len(head) + 1 :], kind, max_bytes)


def read_base64(text: str, kind: MediaKind, max_bytes: int = _NO_LIMIT) -> MediaFile:
    """A file in base64 with padding, without white space.

    Args:
        text: The file, or several frames with commas between them.
        kind: Only a video may be frames.
        max_bytes: The most bytes of all files in it, which is checked before anything is decoded.

    Raises:
        RequestError: The text is not base64, a file is empty, or there are too many bytes or frames.
    """
    num_bytes = len(text) // 4 * 3 - text[-2:].count("=")
    if num_bytes > max_bytes:
        rule = f"{_NAMES[kind]} may have at most {max_bytes} bytes"
        raise RequestError(f"{rule}, but has {num_bytes}; send a smaller file")
    if kind == "image" or "," not in text:
        return _decode(text, _NAMES[kind])
    frames = text.split(",", MAX_FRAMES)
    if len(frames) > MAX_FRAMES:
        raise RequestError(f"a video may have at most {MAX_FRAMES} frames, but has more; send fewer of them")
    return tuple(_decode(frame, "a frame of a video") for frame in frames)


def _decode(text: str, what: str) -> bytes:
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            f"{what} must be base64 with padding, but begins with {text[:20]!r}; encode the file's bytes"
        ) from None
    if not data:
        raise RequestError(f"{what} must be a file, but is empty; encode the file's bytes")
    return data
