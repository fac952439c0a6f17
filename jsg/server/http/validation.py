"""Errors of pydantic in a client's data → a message that says the place, the rule and what was received."""

import json
from collections.abc import Sequence
from typing import Any

from jsg.errors import place_name, shown_name

MAX_QUOTE_CHARS = 100
MAX_QUOTED_ITEMS = 8

RULES = {  # type of pydantic's error → what the value must be; the braces take the context of the error
    "bool_type": "true or false",
    "dict_type": "an object",
    "extra_forbidden": "left out, because nothing reads it",
    "finite_number": "a finite number",
    "float_type": "a number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "an integer",
    "int_parsing": "an integer",
    "int_type": "an integer",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "one of {expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "none_required": "null",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_long": "text of at most {max_length} characters",
    "string_too_short": "text of at least {min_length} characters",
    "string_type": "a string",
    "too_long": "a list of at most {max_length} items",
    "too_short": "a list of at least {min_length} items",
}


def describe_invalid(errors: Sequence[Any], data: object) -> tuple[str, str]:
    """The message and the faulty field for errors that pydantic found in `data`.

    If a value may be of several kinds, there is an error for each kind. The message is about the place where the kind
    that the value comes closest to has failed, and it names every rule for this place.
    """
    first = _place(errors[0], data)
    alike = [(place, error) for error in errors if (place := _place(error, data))[:1] == first[:1]]
    of_right_kind = [(place, error) for place, error in alike if not error["type"].endswith("_type")]
    place = max(place for place, _ in of_right_kind or alike)
    found = [error for other, error in of_right_kind or alike if other == place]
    field, name = str(place[0]), place_name(place)
    if found[0]["type"] == "missing":
        return f"{name} is required, but it is missing; add it", field
    rule = " or ".join(dict.fromkeys(_rule(error) for error in found))
    if len(place) == 1:
        return f"{name} is not valid: it must be {rule}, but got {_quote(found[0]['input'])}; correct it", field
    top, received = shown_name(field), _quote(found[0]["input"])
    return f"{top} is not valid: {name} must be {rule}, but got {received}; correct it", field


def _place(error: Any, data: object) -> tuple[str | int, ...]:
    """The place of an error in the data, without the names of kinds that pydantic puts between its parts."""
    place: list[str | int] = []
    for part in error["loc"]:
        if isinstance(data, dict) and (part in data or error["type"] == "missing"):
            place.append(part)
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            place.append(part)
            data = data[part]
    return tuple(place) or ("body",)


def _rule(error: Any) -> str:
    rule = RULES.get(error["type"])
    return str(error["msg"]) if rule is None else rule.format_map(error.get("ctx", {}))


def _quote(value: object) -> str:
    """A value as text similar to JSON. A large value is shortened before the text is made."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list | dict) and len(value) > MAX_QUOTED_ITEMS:
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)} items"
    quote = repr(value[:MAX_QUOTE_CHARS] if isinstance(value, str) else value)
    return quote if len(quote) <= MAX_QUOTE_CHARS else quote[:MAX_QUOTE_CHARS] + "..."
