"""Pictures and videos in a prompt: each takes many tokens there, all of them the model's placeholder.

A prompt comes in one of two forms. Where it is made of parts, a picture is a part of its own and stands where its part
does. Where it is one text, or tokens, a placeholder in it stands for each picture, and the pictures come beside it.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from jsg.errors import ContextLengthError, RequestError
from jsg.media import MediaInput
from jsg.processing.parts import MediaPart


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PromptMedia:
    """A picture or a video as the model is shown it, wherever in a prompt that will be.

    Attributes:
        placeholder_id: The token that stands for each of its tokens.
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
        """Tokens that it takes in a prompt."""
        return len(self.rows)

    def at(self, start: int) -> MediaInput:
        """The same from that index of a prompt on."""
        return MediaInput(start, self.words, self.rows, self.pixels, self.digest, self.is_video)


@runtime_checkable
class MediaReader(Protocol):
    """Files of pictures and videos → what a model is shown. Any number of threads may use it at a time."""

    @property
    def placeholders(self) -> Mapping[str, str]:
        """The written form of the token that stands for a picture, and for a video where the model takes them."""
        ...

    @property
    def placeholder_ids(self) -> Mapping[str, int]:
        """The same tokens by their ids."""
        ...

    def within(self, namespace: str) -> "MediaReader":
        """The same reader for one part of the prefix cache: nobody learns from its speed what others have shown it."""
        ...

    def read(self, parts: Sequence[MediaPart], max_tokens: int | None = None) -> list[PromptMedia]:
        """All pictures and videos of one request, in order.

        Args:
            parts: Of all its prompts. One that it has several times counts once.
            max_tokens: Of its prompts together, so that no more is decoded than could be of use.

        Raises:
            RequestError: One is damaged, of another kind than the model takes, or they are too many or too large.
            ContextLengthError: They have more tokens.
        """
        ...


def sees_no(kind: str, field: str) -> RequestError:
    """The error for a picture that is sent to a model without eyes."""
    return RequestError(
        f"{field} has a part of kind {kind}, which the model that is served here cannot see; describe it in words, or "
        "serve a model that sees",
        field,
    )


def fill_placeholders(
    ids: Sequence[int],
    places: Sequence[int],
    media: Sequence[PromptMedia],
    field: str,
    max_tokens: int | None = None,
) -> tuple[tuple[int, ...], tuple[MediaInput, ...]]:
    """The prompt in which each placeholder has become all tokens of what it stands for.

    Pictures and videos have placeholders of their own, and of either the first stands for the first.

    Args:
        ids: Tokens of a prompt.
        places: The indices of its placeholders, in order.
        media: What they stand for.
        field: Of the request, for messages.
        max_tokens: The most that a prompt with pictures may have; a small file that comes often could make millions.

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
            raise RequestError(
                f"{field} must have one placeholder for each picture and each video, but of one kind it has {found} "
                f"placeholders and {given} came with it; send as many as there are placeholders",
                field,
            )
    num_tokens = len(ids) - len(places) + sum(item.num_tokens for item in media)
    if media and max_tokens is not None and num_tokens > max_tokens:
        raise ContextLengthError(
            f"prompt and new tokens together must be at most {max_tokens}, but the prompt with its pictures and videos "
            f"has {num_tokens}; send fewer",
            field,
        )
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
) -> tuple[tuple[int, ...], tuple[MediaInput, ...]]:
    """`fill_placeholders` of a prompt as a client wrote it, in which every placeholder counts.

    Pictures for which there are none go to its front, behind BOS, and videos behind those.

    Args:
        reader: None for a model that sees nothing, to which no token is a placeholder.
    """
    if reader is None:
        return tuple(ids), ()
    placeholders = set(reader.placeholder_ids.values())
    ids = list(ids)
    start = len(bos_ids) if tuple(ids[: len(bos_ids)]) == tuple(bos_ids) else 0
    for is_video in (True, False):
        added = [item.placeholder_id for item in media if item.is_video is is_video]
        if added and added[0] not in ids:
            ids[start:start] = added
    places = [index for index, token_id in enumerate(ids) if token_id in placeholders]
    return fill_placeholders(ids, places, media, field, max_tokens)
