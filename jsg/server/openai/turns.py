"""Turns of a conversation, as `/v1/responses` and `/v1/decisions` know them → messages as chat templates take them."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jsg.processing.snapshot_points import PlacedText
from jsg.server.http.field_rules import FieldRules
from jsg.server.media_sources import MediaSource, joined_content
from jsg.server.openai.response_store import Picture, Turn
from jsg.server.openai.responses_tools import flat_name
from jsg.server.shared.messages import arguments_for_template, check_fits, fit_thoughts
from jsg.speech.prompts.chat_template import ChatTemplate

_OLDER_ROLES = {"developer": "system"}


def messages_of(
    turns: Sequence[Turn], template: ChatTemplate, rules: FieldRules
) -> tuple[list[dict[str, Any]], dict[int, Sequence[int]]]:
    """The conversation in the form of chat templates, and index of a message → the tokens that the model wrote.

    Thoughts at its end are left out, for no turn has them. The rules take note of arguments that are no object. Raises
    RequestError.
    """
    messages: list[dict[str, Any]] = []
    answers: dict[int, Sequence[int]] = {}
    for turn in _joined_thoughts(turns):
        role = turn.role if turn.role in template.words else _OLDER_ROLES.get(turn.role, turn.role)
        last: dict[str, Any] = messages[-1] if messages else {"role": None}
        if turn.is_thought:
            if template.thoughts_field is not None:
                messages.append({"role": "assistant", "content": "", "reasoning_content": turn.text})
        elif turn.is_result:
            message = {"role": "tool", "tool_call_id": turn.call_id, "content": joined_content(_pieces(turn))}
            messages.append(message if turn.name is None else message | {"name": turn.name})
        elif turn.name is not None:
            if last["role"] != "assistant":
                messages.append(last := {"role": "assistant", "content": ""})
            function = {
                "name": flat_name(turn.name, turn.namespace),
                "arguments": arguments_for_template(turn.text, rules),
            }
            last.setdefault("tool_calls", []).append({"id": turn.call_id, "type": "function", "function": function})
        elif role == "system" and len(messages) == 1 and _goes_on(last, turn):
            # most templates take one system message, at the front
            last["content"] = joined_content([last["content"], "\n\n", *_pieces(turn)])
        else:
            message = {"role": role, "content": joined_content(_pieces(turn))}
            if role == "assistant" and _is_only_thoughts(last):
                message = messages.pop() | message
            if turn.token_ids:
                answers[len(messages)] = turn.token_ids
            messages.append(message)
    if messages and _is_only_thoughts(messages[-1]):
        messages.pop()
    for message in messages:
        fit_thoughts(message, template)
        check_fits(message, template)
    return messages, answers


def _joined_thoughts(turns: Iterable[Turn]) -> Iterator[Turn]:
    """The turns, with one for thoughts behind one another."""
    for is_thought, run in itertools.groupby(turns, lambda turn: turn.is_thought):
        if is_thought:
            first, *others = run
            yield dataclasses.replace(first, text="\n\n".join(turn.text for turn in (first, *others)))
        else:
            yield from run


def _is_only_thoughts(message: dict[str, Any]) -> bool:
    """Whether a message has thoughts, and waits for what the assistant says behind them."""
    return "reasoning_content" in message and not message["content"] and "tool_calls" not in message


def _goes_on(last: dict[str, Any], turn: Turn) -> bool:
    """Whether a turn of the system can be joined with the last message: both are the system's, and text only."""
    return last["role"] == "system" and isinstance(last["content"], str) and not turn.pictures


def _pieces(turn: Turn) -> list[str | MediaSource]:
    """The texts of a turn with their places, and a `MediaSource` for each picture."""
    pieces: list[str | MediaSource] = []
    end = 0
    for piece in turn.pieces:
        if isinstance(piece, Picture):
            pieces.append(MediaSource("image", piece.url))
        else:
            start, end = end, end + len(piece)
            places = tuple(place - start for place in turn.places if start < place <= end)
            pieces.append(PlacedText(piece, places) if places else piece)
    return pieces
