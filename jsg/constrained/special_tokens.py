"""The spelling of special tokens in a grammar over bytes.

A special token must never come where text is expected, however free the text is. But some models begin a call of a
tool with one. So a special token is spelled between two bytes that UTF-8 never has. Then only a grammar that names the
token allows it, no text token can take its place, and nothing else in a grammar matches a part of it.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from jsg.errors import GrammarError
from jsg.types import GrammarSpec

FIRST_BYTE = 0xFF
LAST_BYTE = 0xFE
MAX_PARTS = 2**15
"""Lists and objects of a structural tag outside its schemas. Looking through them takes the front some 20 ms."""


def special_bytes(name: str) -> bytes:
    """The spelling of the special token that is written `name`."""
    return bytes((FIRST_BYTE,)) + name.encode() + bytes((LAST_BYTE,))


def spelled(text: str, special: Collection[str]) -> bytes:
    """The spelling of a text in which each of these names stands for the special token."""
    if not special:
        return text.encode()
    names = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = re.split(f"({names})", text)
    return b"".join(special_bytes(part) if i % 2 else part.encode() for i, part in enumerate(parts))


def may_be_text(token: bytes) -> bool:
    """Whether a token of these bytes can ever be part of a text: neither of the two bytes is in it."""
    return FIRST_BYTE not in token and LAST_BYTE not in token


def check_names(grammar: GrammarSpec, known: Collection[str]) -> None:
    """Refuses a grammar that names a special token which the model does not have.

    Compiling it would succeed, because the compiler knows no model, and then nothing could come where the token should.

    Args:
        grammar: A grammar of any kind. Only a structural tag can name tokens; the compiler refuses one that is no JSON.
        known: Written forms of the special tokens that a grammar may name with this model.

    Raises:
        GrammarError: The grammar names another token.
    """
    for name in named_tokens(grammar):
        if name not in known:
            there_are = ", ".join(sorted(known)) or "none"
            raise GrammarError(
                f"the token {name[:60]!r} must be a special token that this model has for calls of tools, but there "
                f"are {there_are}; name one of them, or write it as text",
                param=grammar.kind,
            )


def named_tokens(grammar: GrammarSpec) -> list[str]:
    """The special tokens that a grammar names, each once. Raises GrammarError for more parts than `MAX_PARTS`."""
    # A text without the word and without escapes, in which it might be written, has no such key and is not read.
    if grammar.kind != "structural_tag" or ("token" not in grammar.text and "\\u" not in grammar.text):
        return []
    return list(dict.fromkeys(name for name in _names_in(_read(grammar.text)) if isinstance(name, str)))


def _read(text: Any) -> Any:
    """The value of a JSON text; None where it is none, which the compiler refuses."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None


def _names_in(tag: Any) -> Iterator[Any]:
    """The values that stand for token names in the formats of a structural tag, but not those in its schemas."""
    waiting, num_parts = [tag], 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if value.get("type") == "token" and value.get("if_known") is not True:
                yield value.get("token")
            for names in (value.get("trigger_tokens"), value.get("special_tokens")):
                yield from names if isinstance(names, list) else ()
            inside: Iterable[Any] = [each for key, each in value.items() if key not in ("json_schema", "schema")]
            if value.get("type") == "whole" and value.get("kind") == "structural_tag":
                inside = [_read(value.get("text"))]
        else:
            inside = value if isinstance(value, list) else ()
        waiting += [each for each in inside if isinstance(each, dict | list)]
        num_parts += 1
        if num_parts + len(waiting) > MAX_PARTS:
            raise GrammarError(
                f"a structural tag may have at most {MAX_PARTS} lists and objects outside its schemas, but this one "
                "has more; simplify it",
                param="structural_tag",
            )
