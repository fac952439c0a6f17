"""The JSON values of enum and const: their types, when two of them are equal, and how one is written."""

import decimal
import json
import math
from decimal import Decimal

from jsg.constrained.schema.shapes import Json
from jsg.errors import GrammarError

MAX_EXPONENT = 400
"""The largest exponent of numbers in a schema, positive or negative, and the most digits that they may have."""

EXACT = decimal.Context(prec=4 * MAX_EXPONENT)
"""The context in which arithmetic on these numbers rounds nothing."""

TYPES = ("null", "boolean", "number", "string", "array", "object")
"""Every value has exactly one of these types; an integer is a number."""


def type_of(value: Json | Decimal) -> str:
    """The value's type, one of `TYPES`."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case str():
            return "string"
        case list():
            return "array"
        case dict():
            return "object"
    return "number"


def is_number(value: Json | Decimal) -> bool:
    """Whether it is a JSON number. `True` and `False` are none, though Python counts them as int."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def decimal_of(value: int | float | Decimal, where: str) -> Decimal:
    """The exact number.

    Raises:
        GrammarError: It is too long, too large or too small to compute with.
    """
    try:
        number = value if isinstance(value, Decimal) else Decimal(repr(value))
    except ValueError:  # more digits than Python writes out
        number = Decimal("Infinity")
    _, digits, exponent = number.as_tuple()
    if not isinstance(exponent, int) or len(digits) > MAX_EXPONENT or (number and abs(exponent) > MAX_EXPONENT):
        raise GrammarError(
            f"numbers in a schema may have at most {MAX_EXPONENT} digits and an exponent of at most {MAX_EXPONENT}, "
            f"but {where} has more; use a smaller one"
        )
    return number if number else Decimal(0)


def key_of(value: Json | Decimal, where: str) -> str:
    """A text that is the same for two values exactly if JSON Schema calls them equal."""
    return _write(value, where, is_key=True)


def text_of(value: Json | Decimal, where: str) -> str:
    """The value as JSON without spaces, with members in their given order and numbers as short as possible."""
    return _write(value, where, is_key=False)


def _write(value: Json | Decimal, where: str, is_key: bool) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return _write_string(value, where)
        case list():
            return f"[{','.join(_write(item, where, is_key) for item in value)}]"
        case dict():
            members = sorted(value.items()) if is_key else value.items()
            return f"{{{','.join(f'{_write_string(k, where)}:{_write(v, where, is_key)}' for k, v in members)}}}"
    return _write_number(decimal_of(value, where))


def _write_string(value: str, where: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise GrammarError(f"{where} has a lone surrogate, which is no character; leave it out") from None
    return json.dumps(value, ensure_ascii=False)


def _write_number(number: Decimal) -> str:
    _, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    while exponent < 0 and digits[-1] == 0 and len(digits) > 1:
        digits, exponent = digits[:-1], exponent + 1
    shortest = Decimal((number.is_signed(), digits, exponent))
    if shortest == 0:
        return "0"
    is_plain = -7 < shortest.adjusted() < 21
    return f"{shortest:f}" if is_plain else str(shortest).lower()


def described(value: Json) -> dict[str, Json]:
    """A schema for which only this array or object is valid, made of schemas for its parts."""
    if isinstance(value, list):
        return {"prefixItems": [{"const": item} for item in value], "minItems": len(value), "maxItems": len(value)}
    assert isinstance(value, dict)
    # The negation of this schema then asks for a member with another name. A count would not work there, because a name
    # that is written twice counts as two members.
    return {
        "properties": {name: {"const": item} for name, item in value.items()},
        "required": list(value),
        **({"additionalProperties": False} if value else {"maxProperties": 0}),
    }


def ceiling(number: Decimal) -> Decimal:
    """The least integer that is not below the number."""
    return Decimal(math.ceil(number))


def floor(number: Decimal) -> Decimal:
    """The greatest integer that is not above the number."""
    return Decimal(math.floor(number))
