"""What servers that speak OpenAI's wire format take beyond it, and what they leave out."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jsg.errors import ConfigError
from jsg.lang.ir import GEN
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
    """One kind of server. `dataclasses.replace` makes another of it.

    Attributes:
        chat_fields: Argument of a gen → field of a chat request; a dot goes into an object, and
            `response_format` is written as OpenAI wants a schema.
        text_fields: The same of a completions request.
        max_tokens: The field of a chat request that limits its answer.
        go_on: Fields that make a chat answer go on in the last message; None if nothing does.
        choices: The field that holds an answer to a list: `response_format`, a list of texts, or the field of `regex`.
        can_score: A completions request with `echo`, `logprobs` and no new token gives the prompt's logprobs.
        has_logprobs: The tokens of an answer are told apart.
        max_stops: Stop texts of one request.
        max_chat_alternatives, max_text_alternatives: Most likely tokens that are reported at each place.
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
"""By the name that `jsg.OpenAI(dialect=...)` takes. "compatible" is the least that such servers have in common."""


def dialect_of(given: Dialect | str | None, base_url: str | None) -> Dialect:
    """The dialect that was asked for; OpenAI's own where nothing was, and "compatible" at another address.

    Raises:
        ConfigError: There is none of that name.
    """
    if isinstance(given, Dialect):
        return given
    name = given or ("openai" if base_url is None else "compatible")
    if name not in DIALECTS:
        raise ConfigError(f"dialect must be one of {', '.join(DIALECTS)} or a Dialect, but got {name!r}; give one")
    return DIALECTS[name]
