"""The fields that servers with OpenAI's API take beyond it, and those that they do not take."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jsg.errors import ConfigError
from jsg.lang.words.ir import GEN
from jsg.parameters import Remote

_NAMES = {name: field for name, parameter in GEN.items() if (field := parameter.name_in("openai")) is not None}
_GRAMMARS = {name: name for name, parameter in GEN.items() if parameter.role == "grammar"}
_SCHEMA = {"json_schema": "response_format"}
_VLLM_GRAMMARS = {
    "regex": "structured_outputs.regex",
    "json_schema": "structured_outputs.json",
    "ebnf": "structured_outputs.grammar",
}
_GO_ON = {"continue_final_message": True, "add_generation_prompt": False}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """A kind of server. `dataclasses.replace` makes a variant of it.

    Attributes:
        chat_fields: The field of a chat request for each argument of a gen; a dot leads into an object, and
            `response_format` takes a schema in OpenAI's form.
        text_fields: The same for a completions request.
        max_tokens: The field of a chat request that limits its answer.
        go_on: Fields with which a chat answer continues the last message; None if no fields do that.
        choices: The field that forces one of several answers: `response_format`, a list of texts, or that of `regex`.
        can_score: Whether a completions request with `echo`, `logprobs` and no new token gives the prompt's logprobs.
        has_logprobs: Whether the server reports the tokens of an answer.
        max_stops: The largest number of stop texts in a request.
        max_chat_alternatives, max_text_alternatives: The largest number of likeliest tokens at each position.
    """

    chat_fields: Mapping[str, str]
    text_fields: Mapping[str, str]
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    go_on: Mapping[str, Any] | None = None
    choices: str | None = None
    can_score: bool = False
    has_logprobs: bool = True
    max_stops: int = 4
    max_chat_alternatives: int = 20
    max_text_alternatives: int = 5


def _taken_by(remote: Remote) -> dict[str, str]:
    return {name: field for name, field in _NAMES.items() if remote in GEN[name].remote}


DIALECTS: Mapping[str, Dialect] = {
    "openai": Dialect(
        chat_fields=_taken_by("openai") | _SCHEMA,
        text_fields=_taken_by("openai"),
        max_tokens="max_completion_tokens",
        choices="response_format",
    ),
    "compatible": Dialect(chat_fields=_taken_by("openai") | _SCHEMA, text_fields=_taken_by("openai")),
    "jsg": Dialect(
        chat_fields=_NAMES | _GRAMMARS,
        text_fields=_NAMES | _GRAMMARS,
        go_on=_GO_ON,
        choices="choices",
        can_score=True,
        max_stops=16,
        max_text_alternatives=20,
    ),
    "sglang": Dialect(
        chat_fields=_taken_by("sglang") | _GRAMMARS | _SCHEMA,
        text_fields=_taken_by("sglang") | _GRAMMARS,
        go_on={"continue_final_message": True},
        choices="regex",
        max_stops=16,
        max_text_alternatives=20,
    ),
    "vllm": Dialect(
        chat_fields=_taken_by("vllm") | _VLLM_GRAMMARS,
        text_fields=_taken_by("vllm") | _VLLM_GRAMMARS,
        go_on=_GO_ON,
        choices="structured_outputs.choice",
        can_score=True,
        max_stops=16,
        max_text_alternatives=20,
    ),
}
"""The dialects by the names of `jsg.OpenAI(dialect=...)`. "compatible" has what all such servers take."""


def dialect_of(given: Dialect | str | None, base_url: str | None) -> Dialect:
    """Gives the dialect of that name; by default OpenAI's own, or "compatible" at another address.

    Raises:
        ConfigError: No dialect has that name.
    """
    if isinstance(given, Dialect):
        return given
    name = given or ("openai" if base_url is None else "compatible")
    if name not in DIALECTS:
        raise ConfigError(f"dialect must be one of {', '.join(DIALECTS)} or a Dialect, but got {name!r}; give one")
    return DIALECTS[name]
