"""Pictures and videos in a prompt. Each takes many tokens, all of which are the model's placeholder.

A prompt has one of two forms. In a prompt of parts, a picture is a part in its place. In a prompt that is one text, or
tokens, there is a placeholder for each picture, and the pictures come beside it.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jsg.errors import ContextLengthError, RequestError
from jsg.media import MediaInput
from jsg.processing.parts import MediaPart
from jsg.prompt_ids import PromptIds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptMedia:
    """A picture or a video as the model is shown it, without a place in a prompt.

    Attributes:
        placeholder_id: The token that all of its tokens are in a prompt.
        words, rows, pixels, digest, is_video: As in `MediaInput`.
    """

    placeholder_id: int
    words: np.ndarray
    rows: np.ndarray
    pixels: np.ndarray
    digest: bytes
    is_video: bool

    @property
    def num_tokens(self) -> int:
        """The number of its tokens in a prompt."""
        return len(self.rows)

    def at(self, start: int) -> MediaInput:
        """The same, beginning at this index of a prompt."""
        return MediaInput(start, self.words, self.rows, self.pixels, self.digest, self.is_video)


@runtime_checkable
class MediaReader(Protocol):
    """Files of pictures and videos → what a model is shown. Any number of threads may use it."""

    @property
    def placeholders(self) -> Mapping[str, str]:
        """The written form of the placeholder of a picture, and of a video if the model takes videos."""
        ...

    @property
    def placeholder_ids(self) -> Mapping[str, int]:
        """The ids of the same tokens."""
        ...

    def within(self, namespace: str) -> "MediaReader":
        """The same reader for one namespace, so that its speed does not tell what others have sent."""
        ...

    def read(self, parts: Sequence[MediaPart], max_tokens: int | None = None) -> list[PromptMedia]:
        """All pictures and videos of one request, in order.

        Args:
            parts: The parts of all its prompts. A part that is there several times counts once.
            max_tokens: The most tokens of its prompts together, so that nothing is decoded that cannot be used.

        Raises:
            RequestError: A part is damaged or of a kind that the model does not take, or there are too many, or they
                are too large.
            ContextLengthError: The parts have more than `max_tokens`.
        """
        ...


def sees_no(kind: str, field: str) -> RequestError:
    """The error for a picture or video that is sent to a model which sees nothing."""
    return RequestError.of(
        field,
        f"has a part of kind {kind}, which the model that is served here cannot see; describe it in words, or serve a "
        "model that sees",
    )


def fill_placeholders(
    ids: Sequence[int],
    places: Sequence[int],
    media: Sequence[PromptMedia],
    field: str,
    max_tokens: int | None = None,
) -> tuple[tuple[int, ...] | PromptIds, tuple[MediaInput, ...]]:
    """The prompt in which each placeholder is replaced by all tokens of its picture or video.

    Pictures and videos have different placeholders. The first placeholder of each kind stands for the first item of
    that kind.

    Args:
        ids: Tokens of a prompt.
        places: The indices of its placeholders, in order.
        media: The pictures and videos.
        field: The field of the request, for messages.
        max_tokens: The most tokens of a prompt with pictures: a small file could be repeated until it makes millions.

    Raises:
        RequestError: There are more placeholders than pictures or videos, or fewer.
        ContextLengthError: The prompt would have more than `max_tokens`.
    """
    waiting = {is_video: collections.deque(m for m in media if m.is_video is is_video) for is_video in (False, True)}
    by_id = {item.placeholder_id: item.is_video for item in media}
    num_places = collections.Counter(ids[place] for place in places)
    for token_id in sorted({*num_places, *by_id}):
        found, given = num_places[token_id], len(waiting[by_id[token_id]]) if token_id in by_id else 0
        if found != given:
            raise RequestError.of(
                field,
                f"must have one placeholder for each picture and each video, but of one kind it has {found} "
                f"placeholders and {given} came with it; send as many as there are placeholders",
            )
    num_tokens = len(ids) - len(places) + sum(item.num_tokens for item in media)
    if media and max_tokens is not None and num_tokens > max_tokens:
        raise ContextLengthError(
            f"prompt and new tokens together must be at most {max_tokens}, but the prompt with its pictures and videos "
            f"has {num_tokens}; send fewer",
            field,
        )
    if not places:
        return ids if isinstance(ids, PromptIds) else tuple(ids), ()
    filled: list[int] = []
    inputs: list[MediaInput] = []
    done = 0
    for place in places:
        filled += ids[done:place]
        item = waiting[by_id[ids[place]]].popleft()
        inputs.append(item.at(len(filled)))
        filled += (item.placeholder_id,) * item.num_tokens
        done = place + 1
    filled += ids[done:]
    return tuple(filled), tuple(inputs)


def put_media(
    ids: Sequence[int],
    bos_ids: Sequence[int],
    reader: MediaReader | None,
    media: Sequence[PromptMedia],
    field: str,
    max_tokens: int | None = None,
) -> tuple[tuple[int, ...] | PromptIds, tuple[MediaInput, ...]]:
    """`fill_placeholders` of a prompt as a client wrote it, in which every placeholder counts.

    If the prompt has no placeholder for pictures they go to its front, after BOS; videos then go after the pictures.

    Args:
        reader: None for a model that sees nothing, which has no placeholders.
    """
    if reader is None:
        return ids if isinstance(ids, PromptIds) else tuple(ids), ()
    placeholders = set(reader.placeholder_ids.values())
    ids = list(ids)
    start = len(bos_ids) if tuple(ids[: len(bos_ids)]) == tuple(bos_ids) else 0
    for is_video in (True, False):
        added = [item.placeholder_id for item in media if item.is_video is is_video]
        if added and added[0] not in ids:
            ids[start:start] = added
    places = [index for index, token_id in enumerate(ids) if token_id in placeholders]
    return fill_placeholders(ids, places, media, field, max_tokens)
