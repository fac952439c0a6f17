"""The dialects: how each API asks for an answer, and how to read its events. A `Reading` is the state of one answer."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Prompt = str | tuple[int, ...]
Json = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What all requests of a run have in common.

    Attributes:
        model: The server's name of the model.
        temperature: Sampling temperature; 0 is greedy.
        ignore_eos: Whether to generate exactly the asked number of tokens. vLLM, SGLang and jsg know this option,
            OpenAI does not.
        stream: Whether the answer is streamed as events.
        continuous_usage: Whether to ask for the usage in every event (vLLM, SGLang, jsg), which gives the tokens of
            each event.
        extra_body: Fields added to every body.
    """

    model: str
    temperature: float = 0.0
    ignore_eos: bool = False
    stream: bool = True
    continuous_usage: bool = False
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class Reading:
    """What the events of an answer have said so far.

    Attributes:
        text: The text of the answer.
        num_tokens: The number of its tokens; None until the server has given it.
        prompt_tokens, cached_tokens: The server's numbers; None if it does not give them.
        token_ids: The ids of its tokens, if the server gives them.
        finish: Its finish reason; None before the end.
        error: The message of an error event.
    """

    text: str = ""
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    finish: str | None = None
    error: str | None = None


class Dialect(Protocol):
    """One API.

    Attributes:
        path: The path of its endpoint, behind the base URL.
        takes_ids: Whether a prompt may be token ids.
    """

    path: str
    takes_ids: bool

    def body(self, ask: Ask, said: Sequence[Prompt], max_tokens: int) -> Json:
        """The body of a request. The parts of the conversation alternate, beginning with the user's."""
        ...

    def read(self, event: Json, reading: Reading) -> bool:
        """Reads an event, or a whole answer if it is not streamed. Returns whether it had tokens."""
        ...


class _OpenAI:
    """What completions and chat have in common."""

    def _common(self, ask: Ask, max_tokens: int) -> Json:
        body: Json = {"model": ask.model, "max_tokens": max_tokens, "temperature": ask.temperature}
        if ask.stream:
            continuous = {"continuous_usage_stats": True} if ask.continuous_usage else {}
            body |= {"stream": True, "stream_options": {"include_usage": True} | continuous}
        return body | ({"ignore_eos": True} if ask.ignore_eos else {}) | dict(ask.extra_body)

    def read(self, event: Json, reading: Reading) -> bool:
        if _is_error(event, reading):
            return False
        text, is_last = "", True
        for choice in event.get("choices") or ():
            text += self._text(choice)
            is_last = choice.get("finish_reason") is not None
            reading.finish = choice.get("finish_reason") or reading.finish
        reading.text += text
        before = reading.num_tokens or 0
        if usage := event.get("usage"):
            reading.num_tokens = usage.get("completion_tokens", reading.num_tokens)
            reading.prompt_tokens = usage.get("prompt_tokens", reading.prompt_tokens)
            details = usage.get("prompt_tokens_details") or {}
            reading.cached_tokens = details.get("cached_tokens", reading.cached_tokens)
        # A token may have no text yet, such as half a character. Only the usage in its event shows it. The usage of the
        # whole answer comes in an event without choices or, from some servers, in the event with the finish reason.
        return bool(text) or (not is_last and (reading.num_tokens or 0) > before)

    def _text(self, choice: Json) -> str:
        raise NotImplementedError


class Completions(_OpenAI):
    """`/v1/completions`."""

    path = "/v1/completions"
    takes_ids = True

    def body(self, ask: Ask, said: Sequence[Prompt], max_tokens: int) -> Json:
        return {"prompt": joined(said)} | self._common(ask, max_tokens)

    def _text(self, choice: Json) -> str:
        return choice.get("text") or ""


class Chat(_OpenAI):
    """`/v1/chat/completions`. The parts of the conversation become messages of user and assistant in turns."""

    path = "/v1/chat/completions"
    takes_ids = False

    def body(self, ask: Ask, said: Sequence[Prompt], max_tokens: int) -> Json:
        roles = itertools.cycle(("user", "assistant"))
        messages = [{"role": role, "content": text} for text, role in zip(said, roles, strict=False)]
        return {"messages": messages} | self._common(ask, max_tokens)

    def _text(self, choice: Json) -> str:
        said = choice.get("delta") or choice.get("message") or {}
        thought = said.get("reasoning_content") or said.get("reasoning") or ""
        calls = "".join((call.get("function") or {}).get("arguments") or "" for call in said.get("tool_calls") or ())
        return thought + (said.get("content") or "") + (said.get("refusal") or "") + calls


class Native:
    """SGLang's and jsg's `/generate`. Its events have the whole answer so far and the number of its tokens."""

    path = "/generate"
    takes_ids = True

    def body(self, ask: Ask, said: Sequence[Prompt], max_tokens: int) -> Json:
        prompt = joined(said)
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        sampling = {"max_new_tokens": max_tokens, "temperature": ask.temperature}
        sampling |= {"ignore_eos": True} if ask.ignore_eos else {}
        return given | {"sampling_params": sampling, "stream": ask.stream} | dict(ask.extra_body)

    def read(self, event: Json, reading: Reading) -> bool:
        if _is_error(event, reading):
            return False
        before = reading.num_tokens or 0
        meta = event.get("meta_info") or {}
        reading.text = event.get("text") or reading.text
        reading.token_ids = tuple(event.get("output_ids") or reading.token_ids)
        reading.num_tokens = meta.get("completion_tokens", reading.num_tokens)
        reading.prompt_tokens = meta.get("prompt_tokens", reading.prompt_tokens)
        reading.cached_tokens = meta.get("cached_tokens", reading.cached_tokens)
        if reason := meta.get("finish_reason"):
            reading.finish = str(reason.get("type")) if isinstance(reason, dict) else str(reason)
        return (reading.num_tokens or 0) > before


DIALECTS: dict[str, Dialect] = {"openai-completions": Completions(), "openai-chat": Chat(), "native": Native()}


def joined(parts: Sequence[Prompt]) -> Prompt:
    """The parts, all words or all ids, as one prompt."""
    if isinstance(parts[0], str):
        return "".join(part for part in parts if isinstance(part, str))
    return tuple(token for part in parts for token in part if isinstance(token, int))


def _is_error(event: Json, reading: Reading) -> bool:
    """Whether this is an error event. vLLM, OpenAI and jsg have a field `error`; older servers have `object: error`."""
    error = event.get("error")
    if error is None and event.get("object") != "error":
        return False
    said = error.get("message") if isinstance(error, dict) else error
    reading.error = str(said or event.get("message") or "an error event without a message")
    return True
