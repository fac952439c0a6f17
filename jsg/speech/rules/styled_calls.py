"""The grammar of calls whose arguments are written in a style other than JSON: one of `jsg.constrained.call_styles`."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from jsg.constrained.call_styles import CALL_MARKS, CallStyle, is_plain_name
from jsg.errors import GrammarError

Format = dict[str, Any]


def styled_call(
    name: str,
    arguments: Mapping[str, Any],
    style: CallStyle,
    special_tokens: Collection[str] = (),
) -> list[str | Format]:
    """A call of one tool, from its name to the end of its arguments, as texts and formats one after the other.

    Args:
        name: The tool.
        arguments: The format of type `json_schema` of its arguments, which are an object. The reader must get the
            types of the same schema.
        style: How the model writes the call.
        special_tokens: Written forms of the tokenizer's special tokens. Those in marks of the style are written as
            special tokens, not as text.

    Raises:
        GrammarError: The style cannot write the name.
    """
    if not is_plain_name(name):
        raise GrammarError(
            "the name of a tool must have no white space, quotes, brackets and none of the signs :=,<>|\\ in the form "
            f"in which this model writes calls, but got {name[:60]!r}; rename the tool",
            "tools",
        )
    marks = CALL_MARKS[style]
    special = _special_in(dataclasses.astuple(marks), special_tokens)
    styled: Format = {**arguments, "style": style, **({"special_tokens": special} if special else {})}
    return [*_pieces(name.join(marks.name), special), styled, *_pieces(marks.end, special)]


def _special_in(marks: tuple[Any, ...], special_tokens: Collection[str]) -> list[str]:
    """Those of the special tokens that are in marks."""
    texts = [text for mark in marks for text in (mark if isinstance(mark, tuple) else (mark,)) if isinstance(text, str)]
    return sorted(token for token in special_tokens if any(token in text for text in texts))


def _pieces(text: str, special: Collection[str]) -> list[str | Format]:
    """The parts of a text, in which each of these special tokens is a part."""
    names = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    parts = re.split(f"({names})", text) if names else [text]
    return [{"type": "token", "token": part} if i % 2 else part for i, part in enumerate(parts) if part]
