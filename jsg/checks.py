"""Checks of values that a client has sent, and messages that name the rule that a value breaks."""

import difflib
import math
import re
from collections.abc import Collection, Sequence

from jsg.errors import RequestError

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]-]{0,99}")
"""What messages and logs show as the name of a field without quotes. A client may have made up any other name."""


def require(ok: bool, param: str, rule: str, value: object, remedy: str = "leave it out for the default") -> None:
    """Raises RequestError unless `ok`: "`param` must be `rule`, but got `value`; `remedy`"."""
    if not ok:
        raise RequestError(f"{param} must be {rule}, but got {quote(value)}; {remedy}", param=param)


def is_int(value: object) -> bool:
    """Whether the value is an integer. A boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(value: object) -> object:
    """A whole number that was written with a point, such as 16.0, as an integer; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def is_number(value: object) -> bool:
    """Whether the value is a finite number. A boolean is none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def quote(value: object) -> str:
    """The text of a value for a message. It is short, whatever a client has sent."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        if isinstance(value, list | tuple):
            return f"[{repr(list(value[:8]))[1:-1][:200]}" + (", ...]" if len(value) > 8 else "]")
        text = repr(value[:200] if isinstance(value, str) else value)
    except ValueError:  # an integer of thousands of digits has no text
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def place_name(path: Sequence[str | int]) -> str:
    """A place in a body in the form `messages[0].content`. Names that are no plain names are in quotes."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shown_name(part)}" for part in path)
    return "".join(parts).removeprefix(".")


def shown_name(name: str) -> str:
    """The name of a field for a message: in quotes, unless it is a plain name."""
    return name if PLAIN_NAME.fullmatch(name) else quote(name[:40])


def are_token_ids(values: tuple[object, ...]) -> bool:
    """Whether each is an integer in [0, 2^31)."""
    return set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < 2**31))  # pyright: ignore[reportArgumentType]


def token_id(value: object) -> int | None:
    """A token id, which may be text since keys of JSON objects are texts; None for any other value."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def near(name: str, known: Collection[str]) -> str:
    """The part of a message that asks whether a known name was meant; "" where none is like the given one."""
    found = difflib.get_close_matches(name, known, 1, 0.7)
    return f"; did you mean {found[0]}?" if found else ""
