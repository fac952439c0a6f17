"""Prompts in parts: text that is to be encoded, tokens that exist already, and where positions jump.

A program's prompt grows by pieces. What the model wrote must stay the very tokens it chose, or the prefix cache misses
them; what a user wrote must not open a turn; what a chat template wrote must.
"""

import dataclasses
from typing import Literal

MediaKind = Literal["image", "video"]

MediaFile = bytes | tuple[bytes, ...]
"""The file of a picture or a video; or, of a video, those of its frames in order, each a picture."""


def file_size(data: MediaFile) -> int:
    """Bytes, of all frames together."""
    return len(data) if isinstance(data, bytes) else sum(map(len, data))


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    """Text to encode.

    Attributes:
        text: Any valid Unicode.
        is_markup: Special tokens written in it are such tokens: text of a chat template, or a raw prompt.
        is_template: A chat template wrote it, BOS included where the model wants one: none is put before a prompt that
            begins with it, unless the model sees. Only with `is_markup`.
    """

    text: str
    is_markup: bool = False
    is_template: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPart:
    """Tokens as they are."""

    ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OffsetPart:
    """From here on every token's position is so many larger than it would be."""

    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class MediaPart:
    """A picture or a video.

    Attributes:
        data: Its file, or those of its frames.
        media_type: What its sender says of it; the bytes decide.
        num_frames: Of a video: how many of its frames are shown; None for the usual number of a file, and for all where
            the frames themselves came.
    """

    kind: MediaKind
    data: MediaFile = dataclasses.field(repr=False)
    media_type: str
    num_frames: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedPart:
    """Branches side by side behind what comes before: none sees another, and what follows sees all of them.

    Only one in a prompt, and no part of a branch is one.
    """

    branches: "tuple[tuple[Part, ...], ...]"


Part = TextPart | TokenPart | OffsetPart | MediaPart | JoinedPart
