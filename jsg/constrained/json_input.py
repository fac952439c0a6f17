"""Reads the JSON that a client wrote strictly, so that nothing in it is ignored or has two meanings."""

import json
import math
import re
from collections import Counter
from decimal import Decimal
from typing import Any

from jsg.constrained.limits import Limits, check
from jsg.errors import GrammarError

_STRING_OR_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)


def read_json(text: str, param: str, limits: Limits, *, is_exact: bool = False) -> Any:
    """The value of a JSON text.

    Args:
        text: What the client wrote.
        param: The field that errors name.
        limits: They bound length and nesting.
        is_exact: Numbers with a point or an exponent are Decimal, with all their digits.

    Raises:
        GrammarError: The text is no JSON, has a key twice, has a number that JSON does not have, or is too large.
    """
    # A character has up to four bytes: most texts need not be encoded to see that they are short.
    if len(text) * 4 > limits.text_bytes:
        check(len(text.encode(errors="surrogatepass")), limits.text_bytes, "bytes of text", param)
    check(_nesting(text, limits.nesting), limits.nesting, "levels of nesting", param)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
            raise GrammarError(
                f"{param} must have each key once, but {_shown(twice)} is there twice; remove one", param
            )
        return members

    def refuse(word: str) -> Any:
        raise GrammarError(f"{param} must be JSON, which has no {word}; write a number", param)

    def finite(digits: str) -> float | Decimal:
        number = float(digits)
        if math.isinf(number):
            raise GrammarError(
                f"{param} must have numbers below 1e308, but has {digits[:40]}; write a smaller one", param
            )
        return Decimal(digits) if is_exact else number

    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=refuse, parse_float=finite)
    except json.JSONDecodeError as error:
        raise GrammarError(
            f"{param} must be JSON, but at line {error.lineno} column {error.colno}: {error.msg}; correct it", param
        ) from None
    except ValueError:  # an integer of thousands of digits
        raise GrammarError(f"{param} has a number with too many digits; write a shorter one", param) from None
    except RecursionError:
        raise GrammarError(f"{param} is nested too deeply; simplify it", param) from None
    return value


def _nesting(text: str, enough: int) -> int:
    """How deep brackets outside of strings are nested, at most. It may be wrong where the text is no JSON."""
    most = text.count("[") + text.count("{")
    if most <= enough:
        return most
    depth = deepest = 0
    for token in _STRING_OR_BRACKET.finditer(text):
        bracket = token[0]
        if bracket in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif bracket in "]}":
            depth -= 1
    return deepest


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:60] + "…")
