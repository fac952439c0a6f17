"""The turns of a prompt as messages of a chat API."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, assert_never, cast

from jsg.lang.streams.transcript import Said, Turn
from jsg.lang.words.ir import Image, Text, Video
from jsg.processing.media.base64_files import write_data_url


def messages_of(turns: Sequence[Turn | dict[str, Any]]) -> list[dict[str, Any]]:
    """Gives turns as messages of a chat API. A server that ran the program sends messages already."""
    return [turn if isinstance(turn, dict) else _message(turn) for turn in turns]


def _message(turn: Turn) -> dict[str, Any]:
    items: list[str | dict[str, Any]] = []
    reasoning = ""
    for item in turn.content:
        match item:
            case Text(text):
                items.append(text)
            case Said(text, thought):
                reasoning += thought
                items.append(text)
            case Image(data, media_type):
                items.append({"type": "image_url", "image_url": {"url": write_data_url(data, media_type)}})
            case Video(data, num_frames, media_type):
                shown = {"url": write_data_url(data, media_type), "num_frames": num_frames}
                items.append({"type": "video_url", "video_url": shown})
            case _:
                assert_never(item)
    parts = list(_joined_texts(items))
    is_text = all(part["type"] == "text" for part in parts)
    content = "".join(part["text"] for part in parts) if is_text else parts
    message: dict[str, Any] = {"role": turn.role, "content": content}
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _joined_texts(items: Iterable[str | dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for is_text, some in itertools.groupby(items, lambda item: isinstance(item, str)):
        if not is_text:
            yield from cast(Iterable[dict[str, Any]], some)
        elif text := "".join(cast(Iterable[str], some)):
            yield {"type": "text", "text": text}
