"""`data:` URLs (RFC 2397), in base64 only: the form in which APIs of chats take a file."""

import base64
import binascii

from jsg.errors import RequestError

MAX_HEAD = 256
"""Characters in front of the comma."""


def read_data_url(url: str, max_bytes: int) -> bytes:
    """The file inside `data:[type][;parameter=value];base64,DATA`. What it says of the type counts for nothing.

    Args:
        url: Begins with `data:`, in any case.
        max_bytes: Of the file; checked before anything is decoded.

    Raises:
        RequestError: It is not written so, DATA is no base64 (with padding, without white space), empty or too long.
    """
    head, comma, _ = url[: MAX_HEAD + 1].partition(",")
    if not comma or head[:5].lower() != "data:" or not head.lower().endswith(";base64"):
        raise RequestError(f"a data: URL must be data:TYPE;base64,DATA, but begins with {head[:40]!r}; encode the file")
    num_bytes = (len(url) - len(head) - 1) // 4 * 3 - url[-2:].count("=")
    if num_bytes > max_bytes:
        raise RequestError(
            f"a data: URL may hold at most {max_bytes} bytes, but holds {num_bytes}; send a smaller file"
        )
    try:
        data = base64.b64decode(url[len(head) + 1 :], validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(
            "DATA of a data: URL must be base64 with padding, but is not; encode the file's bytes"
        ) from None
    if not data:
        raise RequestError("DATA of a data: URL must be a file, but is empty; encode the file's bytes")
    return data
