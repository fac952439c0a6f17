"""The grammars and documents that every engine is given. Standard library only: other Pythons import this.

Documents are spelled with each grammar's fixed separators, so that every engine gets the same tokens. Every token of a
document is checked to be allowed.
"""

import dataclasses
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Case:
    """One grammar and a text that it matches.

    Attributes:
        name: Its name in reports.
        kind: "json_schema", "regex", "ebnf" or "json" (any JSON value, each engine's built-in grammar).
        text: The grammar.
        document: The text.
        lark: The grammar in llguidance's dialect, for "ebnf".
    """

    name: str
    kind: str
    text: str
    document: str
    lark: str = ""


SMALL = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "house": {"enum": ["Gryffindor", "Slytherin", "Ravenclaw", "Hufflepuff"]},
        "wand": {
            "type": "object",
            "properties": {"wood": {"type": "string"}, "core": {"type": "string"}, "length": {"type": "number"}},
            "required": ["wood", "core", "length"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "house", "wand"],
    "additionalProperties": False,
}
SMALL_DOCUMENT = {
    "name": "Harry Potter",
    "age": 15,
    "house": "Gryffindor",
    "wand": {"wood": "holly", "core": "phoenix feather", "length": 11.5},
}


def _closed(properties: dict[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


NAME = {"type": "string", "minLength": 1, "maxLength": 64}
ADDRESS = _closed({"street": NAME, "city": NAME, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}})
ITEM = _closed(
    {
        "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
        "title": NAME,
        "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
        "price": {"type": "number"},
        "tags": {"type": "array", "items": {"enum": ["new", "sale", "fragile", "heavy"]}, "maxItems": 4},
    }
)
NESTED = _closed(
    {
        "id": {"type": "string", "format": "uuid"},
        "created": {"type": "string", "format": "date"},
        "status": {"enum": ["open", "paid", "sent", "done"]},
        "customer": _closed({"name": NAME, "email": NAME, "address": ADDRESS, "vip": {"type": "boolean"}}),
        "items": {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 20},
        "note": {"anyOf": [NAME, {"type": "null"}]},
    }
)
NESTED_DOCUMENT = {
    "id": "123e4567-e89b-12d3-a456-426614174000",
    "created": "2026-11-20",
    "status": "paid",
    "customer": {
        "name": "Ada Lovelace",
        "email": "ada@example.com",
        "address": {"street": "12 St James's Square", "city": "London", "zip": "10115"},
        "vip": True,
    },
    "items": [
        {
            "sku": f"ABC-{1000 + number}",
            "title": title,
            "quantity": number,
            "price": 19.5 * number,
            "tags": ["new", "sale"][:number],
        }
        for number, title in enumerate(("Punched cards", "Brass gear wheels", "Lamp oil for long nights"), start=1)
    ],
    "note": None,
}
ANY_DOCUMENT = {
    "orders": [NESTED_DOCUMENT, SMALL_DOCUMENT],
    "text": 'A line with "quotes", a back\\slash, a tab\t and more: naïve, 東京, 🚀.',
    "numbers": [0, -1, 2.5, 1e-7, 123456789],
    "empty": [{}, [], ""],
    "flags": {"a": True, "b": False, "c": None},
}
JSON_EBNF = r"""
root ::= value
value ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (member (", " member)*)? "}"
member ::= string ": " value
array ::= "[" (value (", " value)*)? "]"
string ::= "\"" char* "\""
char ::= [^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" hex hex hex hex)
hex ::= [0-9a-fA-F]
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
"""
JSON_LARK = r"""
start: value
value: object | array | STRING | NUMBER | "true" | "false" | "null"
object: "{" (member (", " member)*)? "}"
member: STRING ": " value
array: "[" (value (", " value)*)? "]"
STRING: /"([^"\\\x00-\x1f]|\\(["\\\/bfnrt]|u[0-9a-fA-F]{4}))*"/
NUMBER: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/
"""


OCTET = "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])"
STRING = r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"'


def _case(name: str, schema: dict[str, Any], document: Any) -> Case:
    return Case(name, "json_schema", json.dumps(schema), json.dumps(document, ensure_ascii=False))


CASES = (
    _case("small schema", SMALL, SMALL_DOCUMENT),
    _case("nested schema", NESTED, NESTED_DOCUMENT),
    Case("any JSON, built in", "json", "", json.dumps(ANY_DOCUMENT, ensure_ascii=False)),
    Case("any JSON, user's EBNF", "ebnf", JSON_EBNF, json.dumps(ANY_DOCUMENT, ensure_ascii=False), JSON_LARK),
    Case("email", "regex", r"[a-z0-9._%+-]+@[a-z0-9.-]+\.[a-z]{2,8}", "ada.lovelace+cards@analytical-engine.example"),
    Case("date", "regex", r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])", "2026-11-20"),
    Case(
        "IPv4", "regex", r"((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])", "192.168.0.1"
    ),
    Case("words", "regex", r"[\w\d\s]*", "The quick brown fox jumps over the lazy dog and 12 sleepy cats"),
    Case(
        "JSON string",
        "regex",
        r'"([^"\\\x00-\x1f]|\\["\\/bfnrt])*"',
        '"A line with \\"quotes\\" and naïve words, 東京."',
    ),
    *(
        _case(
            f"maxLength {length}", _closed({"text": {"type": "string", "maxLength": length}}), {"text": "a few words"}
        )
        for length in (64, 2_000, 100_000)
    ),
)
