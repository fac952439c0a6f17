"""Prompts in parts, as JSON: what programs send, whose prompts grow by pieces."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from jsg.errors import RequestError
from jsg.processing.parts import JoinedPart, MediaPart, OffsetPart, Part, TextPart, TokenPart
from jsg.server.http.body import Body, Checked, TokenIds
from jsg.server.media_sources import MAX_FRAMES
from jsg.types import MAX_BRANCHES

type Offset = Annotated[int, Field(ge=0, lt=2**31)]


class BranchPart(Body):
    """A part that is neither text nor tokens: exactly one of `markup`, `template`, `offset`, `image` and `video`."""

    KINDS: ClassVar[Sequence[str]] = ("markup", "template", "offset", "image", "video")
    WITH: ClassVar[Mapping[str, Sequence[str]]] = {"media_type": ("image", "video"), "num_frames": ("video",)}

    markup: str | None = Field(None, description="Text in which special tokens count as such.")
    template: str | None = Field(
        None, description="Text that a chat template wrote: as `markup`, and BOS is never put in front of it."
    )
    offset: Offset | None = Field(None, description="From here on positions are so many larger.")
    image: str | None = Field(None, description="A picture's file in base64.")
    video: str | None = Field(None, description="A video's file in base64.")
    media_type: Annotated[str, Field(max_length=64)] | None = Field(None, description="Of a picture or video.")
    num_frames: Annotated[int, Field(ge=1, le=MAX_FRAMES)] | None = Field(None, description="Of a video.")


class PromptPart(BranchPart):
    """A part that is neither text nor tokens: what stands in `BranchPart`, or `branches`."""

    KINDS: ClassVar[Sequence[str]] = (*BranchPart.KINDS, "branches")

    branches: Annotated[Checked[Checked[str | TokenIds | BranchPart]], Field(max_length=MAX_BRANCHES)] | None = Field(
        None, description="Side by side, each a list of parts: none sees another, what follows sees all; once at most."
    )


type PromptParts = Checked[str | TokenIds | PromptPart]


def to_parts(given: Sequence[str | list[int] | BranchPart], field: str = "prompt") -> tuple[Part, ...]:
    """The parts that a body holds; a bare text is one whose special tokens are plain characters.

    Raises:
        RequestError: A part has none or several of what makes it a part, or there are branches twice.
    """
    parts = tuple(_to_part(item, f"{field}[{index}]", field) for index, item in enumerate(given))
    if sum(isinstance(part, JoinedPart) for part in parts) > 1:
        raise RequestError(f"{field} must have branches once at most, but has them more often; join once", field)
    return parts


def _to_part(item: str | list[int] | BranchPart, place: str, field: str) -> Part:
    if isinstance(item, str):
        return TextPart(item)
    if isinstance(item, list):
        return TokenPart(tuple(item))
    kind = _kind_of(item, place, field)
    match kind:
        case "markup":
            assert item.markup is not None
            return TextPart(item.markup, is_markup=True)
        case "template":
            assert item.template is not None
            return TextPart(item.template, is_markup=True, is_template=True)
        case "offset":
            assert item.offset is not None
            return OffsetPart(item.offset)
        case "branches":
            assert isinstance(item, PromptPart) and item.branches is not None
            return JoinedPart(
                tuple(
                    tuple(
                        _to_part(each, f"{place}.branches[{number}][{index}]", field)
                        for index, each in enumerate(branch)
                    )
                    for number, branch in enumerate(item.branches)
                )
            )
        case "image" | "video":
            return _to_media(item, kind, place, field)
        case _:
            raise AssertionError(kind)


def _kind_of(item: BranchPart, place: str, field: str) -> str:
    given = [name for name in item.KINDS if getattr(item, name) is not None]
    if len(given) != 1:
        rule = f"{place} must have exactly one of {', '.join(item.KINDS)}"
        raise RequestError(f"{rule}, but has {' and '.join(given) or 'none'}; write each as a part of its own", field)
    for name, kinds in item.WITH.items():
        if getattr(item, name) is not None and given[0] not in kinds:
            rule = f"{place} may have {name} only beside {' or '.join(kinds)}"
            raise RequestError(f"{rule}, but has {given[0]}; leave it out", field)
    return given[0]


def _to_media(item: BranchPart, kind: Literal["image", "video"], place: str, field: str) -> MediaPart:
    text = item.image if kind == "image" else item.video
    assert text is not None
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError(f"{place}.{kind} must be base64, but is not; encode the file's bytes", field) from None
    if item.media_type is None:
        raise RequestError(f"{place} must have a media_type beside {kind}, but has none; add it", field)
    return MediaPart(kind, data, item.media_type, item.num_frames)
