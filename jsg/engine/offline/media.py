"""Pictures and videos that a caller of `jsg.Engine` passes with its prompts."""

import operator
from collections.abc import Sequence
from typing import Any

from jsg.errors import RequestError
from jsg.lang.words.media import read_media, read_video
from jsg.processing.media.base64_files import MAX_FRAMES
from jsg.processing.media_prompt import MediaReader, put_media, sees_no
from jsg.processing.parts import MediaFile, MediaKind, MediaPart
from jsg.speech.prompts.encode_parts import EncodedPrompt

Media = Any
"""A picture as `jsg.image` takes it; or a video, which is a file or a tuple of frames as `jsg.image` takes them; or a
list of these. For a list of prompts, a list with one entry for each."""


def with_media(
    id_lists: Sequence[tuple[int, ...]],
    images: Media,
    videos: Media,
    *,
    num_frames: Any = None,
    is_list: bool,
    reader: MediaReader | None,
    max_tokens: int,
    bos_ids: tuple[int, ...],
) -> list[EncodedPrompt]:
    """Each prompt with its pictures and videos at its placeholders, or at its front where it has none.

    Args:
        id_lists: The tokens of the prompts.
        images, videos: The caller's arguments. Files are read now.
        num_frames: Frames of each video, as a whole number of any library. None means the default for a file, and all
            frames of a tuple.
        is_list: Whether the caller gave a list of prompts.
        reader: The model's reader.
        max_tokens: Tokens of a prompt, at most.
        bos_ids: Tokens that the tokenizer puts before a text.

    Raises:
        RequestError: As `MediaReader.read`. Also, the model takes text only, a list is not as long as that of the
            prompts, or `num_frames` is out of range or has no videos.
        OSError: A file cannot be read.
    """
    num_frames = _checked_frames(num_frames, videos)
    image_lists = _each("image", images, len(id_lists), is_list=is_list)
    video_lists = _each("video", videos, len(id_lists), is_list=is_list, num_frames=num_frames)
    own = [[*some, *others] for some, others in zip(image_lists, video_lists, strict=True)]
    encoded: list[EncodedPrompt] = []
    for ids, parts in zip(id_lists, own, strict=True):
        if parts and reader is None:
            raise sees_no(parts[0].kind, f"{parts[0].kind}_data")
        media = [] if reader is None else reader.read(parts, max_tokens)
        input_ids, inputs = put_media(ids, bos_ids, reader, media, "prompt", max_tokens)
        encoded.append(EncodedPrompt(input_ids=input_ids, media=inputs))
    return encoded


def _checked_frames(num_frames: Any, videos: Media) -> int | None:
    """The number as an int. Raises RequestError."""
    if num_frames is None:
        return None
    if videos is None:
        raise RequestError("num_frames is of videos, but there is no video_data; leave it out", "num_frames")
    is_whole = hasattr(num_frames, "__index__") and not isinstance(num_frames, bool)
    if not is_whole or not 1 <= operator.index(num_frames) <= MAX_FRAMES:
        raise RequestError(
            f"num_frames must be a whole number from 1 to {MAX_FRAMES}, but got {num_frames!r:.60}; correct it",
            "num_frames",
        )
    return operator.index(num_frames)


def _each(
    kind: MediaKind, given: Media, count: int, *, is_list: bool, num_frames: int | None = None
) -> list[list[MediaPart]]:
    """The parts of each prompt. Raises RequestError."""
    if given is None:
        return [[]] * count
    if not is_list:
        given = [given]
    elif not isinstance(given, list) or len(given) != count:
        name, got = f"{kind}_data", len(given) if isinstance(given, list) else "one"
        raise RequestError(
            f"{name} must be a list with an entry for each of the {count} prompts, but got {got}; give None where a "
            "prompt has none",
            param=name,
        )
    lists = [item if isinstance(item, list) else [] if item is None else [item] for item in given]
    return [[MediaPart(kind, _read(kind, item), "", num_frames) for item in items] for items in lists]


def _read(kind: MediaKind, item: Any) -> MediaFile:
    return read_video(item)[0] if kind == "video" and isinstance(item, tuple) else read_media(item, kind)
