"""Parts of a prompt: text to encode, tokens that exist already, pictures, and jumps of positions.

A program's prompt grows part by part. The model's text must stay the very tokens that the model chose, because the
prefix cache would miss others. A user's text must not open a turn; the text of a chat template must.
"""

import dataclasses
from typing import Literal

from jsg.prompt_ids import PromptIds

MediaKind = Literal["image", "video"]

MediaFile = bytes | tuple[bytes, ...]
"""The file of a picture or a video, or the files of a video's frames in order, each a picture."""


def file_size(data: MediaFile) -> int:
    """The number of bytes, of all frames together."""
    return len(data) if isinstance(data, bytes) else sum(map(len, data))


@dataclasses.dataclass(frozen=True, slots=True)
class TextPart:
    """Text to encode.

    Attributes:
        text: Any valid Unicode. An empty text marks a place from which other prompts are likely to go on.
        is_markup: Special tokens that are written in it count, as in the text of a chat template or a raw prompt.
        is_template: A chat template wrote it, with BOS if the model wants one. So a prompt that begins with it gets no
            BOS, unless the model sees. Only with `is_markup`.
    """

    text: str
    is_markup: bool = False
    is_template: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPart:
    """Tokens as they are. None at all end the text before them, and mark a place as an empty text does."""

    ids: tuple[int, ...] | PromptIds


@dataclasses.dataclass(frozen=True, slots=True)
class OffsetPart:
    """Makes the position of every token from here on larger by `offset`."""

    offset: int


@dataclasses.dataclass(frozen=True, slots=True)
class MediaPart:
    """A picture or a video.

    Attributes:
        data: Its file, or the files of its frames.
        media_type: The type that its sender names. The bytes decide.
        num_frames: How many frames of a video are shown. None shows the usual number of a file, or all frames that
            came as files.
    """

    kind: MediaKind
    data: MediaFile = dataclasses.field(repr=False)
    media_type: str
    num_frames: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class JoinedPart:
    """Branches side by side after a common prefix. No branch sees another, and what follows sees all of them.

    A prompt has one at most, and no branch has one.
    """

    branches: "tuple[tuple[Part, ...], ...]"


Part = TextPart | TokenPart | OffsetPart | MediaPart | JoinedPart
