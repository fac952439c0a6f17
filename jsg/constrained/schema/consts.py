"""Makes an expression of one known value, with the grammar's white space between the JSON tokens."""

import json
from decimal import Decimal
from typing import Any

from jsg.constrained.ir import MAX_ONCE, Bag, BagItem, Expr, separated, seq
from jsg.constrained.schema.json_text import words
from jsg.constrained.schema.scope import Scope
from jsg.constrained.schema.spelling import Spelling

_LARGE = 10**16
"""From this number on, `json.dumps` writes a float with an exponent."""


class _NumberText(str):
    """A number as the JSON text spells it."""


def const_expr(scope: Scope, text: str) -> Expr:
    """The expression of a canonical JSON text. With order "free", members of objects may come in any order."""
    return _value(scope, json.loads(text, parse_int=_NumberText, parse_float=_NumberText))


def scalar_words(spelling: Spelling, text: str) -> tuple[bytes, ...] | None:
    """The spellings of a scalar; None for an array or object."""
    if text[0] == '"':
        return spelling.scalar_string(json.loads(text))
    if text[0] in "[{":
        return None
    return _number_words(text) if text[0] in "-0123456789" else spelling.words[text]


def _value(scope: Scope, value: Any) -> Expr:
    spacing, spelling = scope.spacing, scope.spelling
    match value:
        case _NumberText():
            return words(_number_words(value))
        case str():
            return words(spelling.scalar_string(value))
        case list() | dict() if not value:
            return spacing.empty("[]" if isinstance(value, list) else "{}")
        case list():
            return spacing.enclosed("[", separated([_value(scope, item) for item in value], spacing.comma), "]")
        case dict():
            members = [
                seq(spelling.known_name(name), spacing.colon, _value(scope, item))
                for name, item in spelling.in_order(value)
            ]
            if scope.order == "free" and 1 < len(members) <= MAX_ONCE:
                items = tuple(BagItem(member, is_once=True, is_required=True) for member in members)
                return spacing.enclosed("{", Bag(items, spacing.comma), "}")
            return spacing.enclosed("{", separated(members, spacing.comma), "}")
        case _:
            return words(spelling.words[json.dumps(value)])


def _number_words(text: str) -> tuple[bytes, ...]:
    """The spellings of a number: the one in the text, and those of `json.dumps`."""
    number = Decimal(text)
    spellings = [text]
    is_whole = number == number.to_integral_value()
    if is_whole:
        spellings.append(str(int(number)))
    if not is_whole or abs(number) >= _LARGE:
        written = json.dumps(float(number))
        spellings.extend([written] if Decimal(written) == number else [])
    return tuple(dict.fromkeys(spelling.encode() for spelling in spellings))
