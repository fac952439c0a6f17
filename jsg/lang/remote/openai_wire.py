"""OpenAI's chat and completions APIs by the `openai` package, which is loaded with this module."""

import contextlib
import json
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any, final

import openai

from jsg.errors import UnsupportedError
from jsg.lang.remote.arguments import Unsupported, put_field, request_fields
from jsg.lang.remote.dialects import Dialect
from jsg.lang.remote.transport import PackageApi
from jsg.lang.remote.wire import Abilities, Bill, Call, Delta, Message, Picture, Scored, Token
from jsg.lang.streams.per_loop import PerLoop
from jsg.parameters import named

_OF_THE_PACKAGE = frozenset(
    {
        *(field for field, parameter in named("openai").items() if "openai" in parameter.remote),
        *("response_format", "logprobs", "top_logprobs", "logit_bias"),
    }
)
"""The fields that methods of the package take by name. Others go into `extra_body`."""


class _Api(PackageApi[openai.AsyncOpenAI]):
    """What both APIs have in common.

    Attributes:
        fields: The field of a request for each argument of a gen.
    """

    def __init__(
        self,
        clients: PerLoop[openai.AsyncOpenAI],
        model: str,
        dialect: Dialect,
        unsupported: Unsupported,
        *,
        is_chat: bool,
    ):
        self.fields = dialect.chat_fields if is_chat else dialect.text_fields
        num_top = dialect.max_chat_alternatives if is_chat else dialect.max_text_alternatives
        forces_choices_inside = dialect.choices not in (None, "response_format")
        abilities = Abilities(
            continues=not is_chat or dialect.go_on is not None,
            reports_tokens=dialect.has_logprobs,
            max_stops=dialect.max_stops,
            takes_stop_regex="stop_regex" in self.fields,
            forces_choices=dialect.choices is not None if is_chat else forces_choices_inside,
            forces_choices_inside=forces_choices_inside,
            max_alternatives=num_top if dialect.has_logprobs else 0,
        )
        super().__init__(clients, model, unsupported, abilities, openai.APIError)
        self._dialect = dialect

    def _arguments(self, call: Call, fields: dict[str, Any], max_tokens: str) -> dict[str, Any]:
        """Gives the arguments of a method of the package, without the prompt."""
        args = call.args
        fields = request_fields(args, self.fields, self._unsupported) | fields | _choices_field(call, self._dialect)
        named = {name: value for name, value in fields.items() if name in _OF_THE_PACKAGE}
        beside = {name: value for name, value in fields.items() if name not in _OF_THE_PACKAGE}
        given = {
            max_tokens: args.max_tokens,
            "temperature": args.temperature,
            "n": args.n,
            "stop": None if args.stop is None else list(args.stop),
            "extra_body": beside or None,
        }
        always = {"model": self._model, "stream": True, "stream_options": {"include_usage": True}}
        return always | named | {name: value for name, value in given.items() if value is not None}


@final
class ChatApi(_Api):
    """`/chat/completions`."""

    def __init__(self, clients: PerLoop[openai.AsyncOpenAI], model: str, dialect: Dialect, unsupported: Unsupported):
        super().__init__(clients, model, dialect, unsupported, is_chat=True)

    async def stream(self, call: Call) -> AsyncGenerator[Delta]:
        """As `Api.stream`."""
        assert isinstance(call.prompt, tuple)
        unwraps = bool(call.choices) and self._dialect.choices == "response_format"
        wrapped: list[str] = []

        def read(choice: Any) -> tuple[str, tuple[Token, ...] | None]:
            text = choice.delta.content or ""
            if unwraps:
                wrapped.append(text)
                return _unwrap("".join(wrapped)) if choice.finish_reason else "", None
            return text, _chat_tokens(choice.logprobs, text) if call.wants_tokens else None

        messages: list[Any] = [_message(message) for message in call.prompt]
        arguments = self._arguments(call, self._fields(call), self._dialect.max_tokens)
        stream = await self._clients.here().chat.completions.create(messages=messages, **arguments)
        async with contextlib.aclosing(_deltas(stream, read)) as deltas:
            async for delta in deltas:
                yield delta

    def _fields(self, call: Call) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        assert isinstance(call.prompt, tuple)
        last = call.prompt[-1]
        if last.role == "assistant" and last.parts:
            if self._dialect.go_on is None:
                raise UnsupportedError(f"{self.name} cannot go on in a turn of the assistant that has begun")
            fields |= self._dialect.go_on
        if call.wants_tokens:
            fields["logprobs"] = True
            if call.num_alternatives:
                fields["top_logprobs"] = call.num_alternatives
        return fields

    async def score(self, prompt: str, choices: tuple[str, ...]) -> Scored | None:
        """Gives None, as a chat API reports nothing of its prompt."""
        return None


@final
class TextApi(_Api):
    """`/completions`."""

    def __init__(self, clients: PerLoop[openai.AsyncOpenAI], model: str, dialect: Dialect, unsupported: Unsupported):
        super().__init__(clients, model, dialect, unsupported, is_chat=False)

    async def stream(self, call: Call) -> AsyncGenerator[Delta]:
        """As `Api.stream`."""
        assert isinstance(call.prompt, str)
        fields: dict[str, Any] = {"logprobs": call.num_alternatives} if call.wants_tokens else {}
        if call.allowed:
            fields["logit_bias"] = {str(token): 100 for token in call.allowed}

        def read(choice: Any) -> tuple[str, tuple[Token, ...] | None]:
            return choice.text or "", _text_tokens(choice.logprobs, choice.text) if call.wants_tokens else None

        arguments = self._arguments(call, fields, "max_tokens")
        stream = await self._clients.here().completions.create(prompt=call.prompt, **arguments)
        async with contextlib.aclosing(_deltas(stream, read)) as deltas:
            async for delta in deltas:
                yield delta

    async def score(self, prompt: str, choices: tuple[str, ...]) -> Scored | None:
        """Scores all choices in one request."""
        if not self._dialect.can_score:
            return None
        answer = await self._clients.here().completions.create(
            model=self._model,
            prompt=[prompt, *(prompt + choice for choice in choices)],
            max_tokens=0,
            echo=True,
            logprobs=0,
            temperature=0,
        )
        by_index = sorted(answer.choices, key=lambda choice: choice.index)
        texts = [_text_tokens(choice.logprobs, choice.text) for choice in by_index]
        bill = Bill() if answer.usage is None else _bill(answer.usage)
        return Scored(tuple(tokens or () for tokens in texts), bill)


async def _deltas(stream: Any, read: Callable[[Any], tuple[str, tuple[Token, ...] | None]]) -> AsyncGenerator[Delta]:
    """Gives the deltas of a call; `read` gives the text and the tokens of a choice."""
    async with stream:
        async for chunk in stream:
            for choice in chunk.choices:
                text, tokens = read(choice)
                yield Delta(
                    text=text,
                    index=choice.index,
                    tokens=tokens,
                    finish=choice.finish_reason,
                    matched=_matched(choice),
                )
            if chunk.usage is not None:
                yield Delta(bill=_bill(chunk.usage))


def _message(message: Message) -> dict[str, Any]:
    if all(isinstance(part, str) for part in message.parts):
        return {"role": message.role, "content": message.text}
    return {"role": message.role, "content": [_part(part) for part in message.parts]}


def _part(part: str | Picture) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image_url", "image_url": {"url": f"data:{part.media_type};base64,{part.base64}"}}


def _choices_field(call: Call, dialect: Dialect) -> dict[str, Any]:
    """Gives the field that forces the answer to be one of the call's choices."""
    if not call.choices:
        return {}
    match dialect.choices:
        case None:
            raise UnsupportedError("this API cannot be held to a list of choices")
        case "response_format":
            schema = {
                "type": "object",
                "properties": {"choice": {"type": "string", "enum": list(call.choices)}},
                "required": ["choice"],
                "additionalProperties": False,
            }
            form = {"name": "choice", "schema": schema, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": form}}
        case path if path == dialect.chat_fields.get("regex"):
            return put_field({}, path, "|".join(_literally(choice) for choice in call.choices))
        case path:
            return put_field({}, path, list(call.choices))


def _literally(text: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]()|])", r"\\\1", text)


def _unwrap(text: str) -> str:
    """Gives the choice in a JSON object; the text itself, which the caller refuses, if it is no such object."""
    try:
        return str(json.loads(text)["choice"])
    except (ValueError, KeyError, TypeError):
        return text


def _text_tokens(logprobs: Any, text: str | None) -> tuple[Token, ...] | None:
    if logprobs is None or logprobs.tokens is None:
        return None if text else ()
    scores = logprobs.token_logprobs or [None] * len(logprobs.tokens)
    tops = logprobs.top_logprobs or [None] * len(logprobs.tokens)
    return tuple(
        Token(token, score, top or {}) for token, score, top in zip(logprobs.tokens, scores, tops, strict=True)
    )


def _chat_tokens(logprobs: Any, text: str) -> tuple[Token, ...] | None:
    if logprobs is None or logprobs.content is None:
        return None if text else ()
    return tuple(
        Token(one.token, one.logprob, {top.token: top.logprob for top in one.top_logprobs or ()})
        for one in logprobs.content
    )


def _matched(choice: Any) -> str | None:
    """Gives the stop text that ended an answer, which is `matched_stop` for SGLang and jsg, `stop_reason` for vLLM."""
    extra: Mapping[str, Any] = choice.model_extra or {}
    found = extra.get("matched_stop", extra.get("stop_reason"))
    return found if isinstance(found, str) else None


def _bill(usage: Any) -> Bill:
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return Bill(int(usage.prompt_tokens or 0), int(usage.completion_tokens or 0), int(cached))
