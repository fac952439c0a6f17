"""Anthropic's Messages API by the `anthropic` package, which is loaded with this module."""

import dataclasses
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, final

import anthropic

from jsg.errors import UnsupportedError
from jsg.lang.remote.arguments import Unsupported, request_fields
from jsg.lang.remote.transport import PackageApi
from jsg.lang.remote.wire import Abilities, Bill, Call, Delta, Message, Picture, Scored
from jsg.lang.streams.per_loop import PerLoop
from jsg.parameters import named

FINISHES: Mapping[str, str] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
}
"""The reasons why an answer ended, in the words of the language. Other reasons stay as they are."""
_SAMPLING = {
    argument: field
    for field, parameter in named("anthropic").items()
    if (argument := parameter.name_in("gen")) is not None and "anthropic" in parameter.remote
}
_SCHEMA = {"json_schema": "output_config"}
_TOOL = "choose"
_TOKENS_OF_A_TOOL_CALL = 64  # for the text around the choice itself


@final
class MessagesApi(PackageApi[anthropic.AsyncAnthropic]):
    """`/v1/messages`."""

    def __init__(
        self,
        clients: PerLoop[anthropic.AsyncAnthropic],
        model: str,
        unsupported: Unsupported,
        *,
        prefill: bool,
        sampling: bool,
    ):
        abilities = Abilities(
            continues=prefill,
            reports_tokens=False,
            max_stops=8191,
            takes_blank_stops=False,
            takes_temperature=sampling,
            has_n=False,
            forces_choices=True,
        )
        super().__init__(clients, model, unsupported, abilities, anthropic.APIError)
        self._has_sampling = sampling

    async def stream(self, call: Call) -> AsyncGenerator[Delta]:
        """Does what `Api.stream` says."""
        assert isinstance(call.prompt, tuple)
        system, messages = _split_system(call.prompt, self.name)
        messages, blank = _without_blank_end(_without_blank_turns(messages))
        turns: list[Any] = [_message(message) for message in messages]
        stream = await self._clients.here().messages.create(
            model=self._model,
            messages=turns,
            stream=True,
            **({"system": [_part(part) for part in system]} if system else {}),
            **self._arguments(call, has_begun=bool(messages) and messages[-1].role == "assistant"),
        )
        reader, start = _EventReader(is_tool=bool(call.choices)), _Start(blank)
        async with stream:
            async for event in stream:
                for delta in reader.push(event):
                    text = start.push(delta.text, is_last=delta.finish is not None)
                    yield dataclasses.replace(delta, text=text)

    def _arguments(self, call: Call, *, has_begun: bool) -> dict[str, Any]:
        """Gives the arguments of the package's method; with `has_begun` to continue a turn. Raises UnsupportedError."""
        args = call.args
        if has_begun and args.json_schema is not None:
            self._unsupported.leave_out(
                "json_schema", "it takes none within a turn that has begun; put the gen at the beginning of its turn"
            )
            args = dataclasses.replace(args, json_schema=None)
        names = _SCHEMA | (_SAMPLING if self._has_sampling else {})
        fields = request_fields(args, names, self._unsupported)
        config = fields.pop("output_config", None)
        if args.temperature not in (None, 1.0):
            if self._has_sampling:
                fields["temperature"] = args.temperature  # newer versions of the package have no argument of this name
            else:
                self._unsupported.leave_out("temperature", "the model takes none; leave it at 1")
        given: dict[str, Any] = {
            "max_tokens": args.max_tokens,
            "stop_sequences": None if args.stop is None else list(args.stop),
            "output_config": config,
            "extra_body": fields or None,
        }
        if call.choices:
            given["max_tokens"] = (args.max_tokens or 0) + _TOKENS_OF_A_TOOL_CALL
            given |= {"tools": [_tool(call.choices)], "tool_choice": {"type": "tool", "name": _TOOL}}
        return {name: value for name, value in given.items() if value is not None}

    async def score(self, prompt: str, choices: tuple[str, ...]) -> Scored | None:
        """Gives None, as the API reports no logprobs."""
        return None


@final
class _EventReader:
    """Reads the events of one answer."""

    def __init__(self, *, is_tool: bool) -> None:
        self._is_tool = is_tool
        self._tool_input: list[str] = []
        self._prompt_tokens = 0
        self._cached_tokens = 0

    def push(self, event: Any) -> list[Delta]:
        """Gives the deltas of an event."""
        match event.type:
            case "message_start":
                usage = event.message.usage
                self._cached_tokens = int(usage.cache_read_input_tokens or 0)
                written = int(usage.cache_creation_input_tokens or 0)
                self._prompt_tokens = int(usage.input_tokens or 0) + self._cached_tokens + written
                return [Delta(bill=Bill(self._prompt_tokens, 0, self._cached_tokens))]
            case "content_block_delta" if event.delta.type == "text_delta" and not self._is_tool:
                return [Delta(text=event.delta.text)]
            case "content_block_delta" if event.delta.type == "input_json_delta":
                self._tool_input.append(event.delta.partial_json)
            case "message_delta":
                return [Delta(text=self._choice()), self._end(event)]
        return []

    def _end(self, event: Any) -> Delta:
        reason = event.delta.stop_reason
        return Delta(
            finish=FINISHES.get(reason, reason),
            matched=event.delta.stop_sequence,
            bill=Bill(self._prompt_tokens, int(event.usage.output_tokens or 0), self._cached_tokens),
        )

    def _choice(self) -> str:
        """Gives the choice with which the tool was called; "", which is refused, where the call has another form."""
        try:
            return str(json.loads("".join(self._tool_input))["choice"])
        except (ValueError, KeyError, TypeError):
            return ""


def _split_system(messages: Sequence[Message], name: str) -> tuple[list[str | Picture], list[Message]]:
    """Splits off the turns of the system at the beginning. Raises UnsupportedError for a later one."""
    rest = list(messages)
    system: list[str | Picture] = []
    while rest and rest[0].role == "system":
        system += rest.pop(0).parts
    if any(message.role == "system" for message in rest):
        raise UnsupportedError(f"{name} takes turns of the system only before all others; put this one first")
    return system, rest


def _without_blank_turns(messages: Sequence[Message]) -> list[Message]:
    """Removes blank turns of the assistant, which the API refuses unless they are the last.

    Such a turn is in a conversation where the model ended at once, or wrote its stop first. The turns around it become
    one, as the API itself joins consecutive turns of one role.
    """
    kept: list[Message] = []
    has_gap = False
    for number, message in enumerate(messages, 1):
        if message.role == "assistant" and not message.text.strip() and number < len(messages):
            has_gap = True
        elif has_gap and kept and kept[-1].role == message.role:
            kept[-1] = Message(message.role, kept[-1].parts + message.parts)
            has_gap = False
        else:
            kept.append(message)
            has_gap = False
    return kept


def _without_blank_end(messages: list[Message]) -> tuple[list[Message], str]:
    """Removes white space at the end of a last turn of the assistant, as the API demands, and also gives it.

    If the turn is then empty, it is left out, because the API takes no empty turn.
    """
    last = messages[-1] if messages else None
    if last is None or last.role != "assistant":
        return messages, ""
    text = last.text.rstrip()
    blank = last.text[len(text) :]
    return [*messages[:-1], *([Message("assistant", (text,))] if text else [])], blank


@final
class _Start:
    """Removes white space at the beginning of an answer, if it repeats that removed from the end of the prompt."""

    def __init__(self, blank: str) -> None:
        self._blank = blank
        self._held = ""

    def push(self, text: str, *, is_last: bool) -> str:
        """Gives the text of the answer after the prompt as the program wrote it."""
        if not self._blank:
            return text
        text = self._held + text
        if self._blank.startswith(text) and text != self._blank and not is_last:
            self._held = text
            return ""
        for length in range(len(self._blank), 0, -1):
            if text.startswith(self._blank[-length:]):
                text = text[length:]
                break
        self._blank = self._held = ""
        return text


def _message(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": [_part(part) for part in message.parts]}


def _part(part: str | Picture) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image", "source": {"type": "base64", "media_type": part.media_type, "data": part.base64}}


def _tool(choices: Sequence[str]) -> dict[str, Any]:
    choice = {"type": "string", "enum": list(choices)}
    return {
        "name": _TOOL,
        "description": "Says which of the choices comes next.",
        "input_schema": {
            "type": "object",
            "properties": {"choice": choice},
            "required": ["choice"],
            "additionalProperties": False,
        },
    }
