"""The formats of calls whose arguments are written in a style other than JSON; `jsg.call_styles` has the styles."""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, final

from jsg.call_styles import LITERAL_MARKS, XML_MARKS, CallStyle, is_plain_name
from jsg.errors import GrammarError

Format = dict[str, Any]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class StyledCall:
    """The grammar of one call, in the parts that a reader of the style reads.

    Attributes:
        head: The text before the arguments, with the name of the tool.
        body: The format of the arguments.
        end: The text behind them.
    """

    head: str
    body: Format
    end: str

    def format(self, special: Collection[str]) -> Format:
        """The whole call. `special` are the written forms of the special tokens that may be in its marks."""
        elements = [*text_formats(self.head, special), self.body, *text_formats(self.end, special)]
        return {"type": "sequence", "elements": elements}


def styled_call(
    name: str,
    schema: Mapping[str, Any],
    style: CallStyle,
    special_tokens: Collection[str] = (),
    *,
    is_strict: bool = True,
) -> StyledCall:
    """The grammar of a call of one tool in a style.

    Args:
        name: The tool.
        schema: JSON Schema of its arguments, an object.
        style: How the model writes the call.
        special_tokens: Written forms of the tokenizer's special tokens.
        is_strict: Whether a schema that cannot be enforced is an error; otherwise the arguments are then any object.

    Raises:
        GrammarError: The style cannot write the name.
    """
    if not is_plain_name(name):
        raise GrammarError(
            "the name of a tool must have no white space, quotes, brackets and none of the signs :=,<>|\\ in the form "
            f"in which this model writes calls, but got {name[:60]!r}; rename the tool",
            "tools",
        )
    body: Format = {"type": "json_schema", "json_schema": schema, "style": style}
    if special := special_in_marks(style, special_tokens):
        body["special_tokens"] = special
    if not is_strict:
        body["or_any_object"] = True
    marks = XML_MARKS.get(style) or LITERAL_MARKS[style]
    return StyledCall(name.join(marks.name), body, marks.end)


def special_in_marks(style: CallStyle, special_tokens: Collection[str]) -> list[str]:
    """Those of the special tokens that a call in this style has in its marks."""
    fields = dataclasses.astuple(XML_MARKS.get(style) or LITERAL_MARKS[style])
    texts = [text for field in fields for text in (field if isinstance(field, tuple) else (field,))]
    return sorted(token for token in special_tokens if any(isinstance(text, str) and token in text for text in texts))


def text_formats(text: str, special: Collection[str]) -> list[Format]:
    """The formats of a text in which each of these special tokens stands for itself."""
    names = "|".join(re.escape(token) for token in sorted(special, key=len, reverse=True))
    parts = re.split(f"({names})", text) if names else [text]
    formats: list[Format] = [
        {"type": "token", "token": part} if i % 2 else {"type": "const_string", "value": part}
        for i, part in enumerate(parts)
    ]
    return [each for each in formats if each.get("value") != ""]
