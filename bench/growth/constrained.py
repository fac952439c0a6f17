"""Curves of grammars that are compiled: how time and tables grow with a grammar.

The work of a curve is the bytes of the tables. Grammars are compiled in a process of their own, so nobody waits for a
single call.
"""

import itertools
import json
import random
import string
from collections.abc import Callable, Mapping
from typing import Any

from bench.growth.curve import Calls, Curve
from jsg.constrained.compiler import compile_tables
from jsg.types import GrammarKind, GrammarSpec

SIZES = (128, 512, 2048)
FEWER = (32, 128, 512)
DEEP = (10, 20, 40, 80)
TYPES = ({"type": "string"}, {"type": "integer"}, {"type": "boolean"})

Text = Callable[[list[str]], str]
"""The text of a grammar with so many words."""
Schema = Callable[[list[str]], object]


def words(count: int) -> list[str]:
    """So many different words that look like names of properties."""
    rng = random.Random(1)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(rng.choices(string.ascii_lowercase + "_", k=rng.randint(5, 14)))] = None
    return list(found)


def _object(names: list[str], **keywords: Any) -> dict[str, Any]:
    """An object with these optional properties."""
    types = {name: TYPES[number % len(TYPES)] for number, name in enumerate(names)}
    return {"type": "object", "properties": types, **keywords}


def _nested(names: list[str]) -> object:
    """Objects inside of each other, each with two more properties."""
    schema: dict[str, Any] = {"type": "string"}
    for name in names:
        own = _object([f"{name}_a", f"{name}_b"])
        own["properties"][name] = schema
        schema = own
    return schema


def _definitions(names: list[str]) -> object:
    """Definitions, of which each is the type of a property of the one before."""
    own = {name: _object(["id", "text"], required=["id"]) for name in names}
    for name, following in itertools.pairwise(names):
        own[name]["properties"]["next"] = {"$ref": f"#/$defs/{following}"}
    return {"$ref": f"#/$defs/{names[0]}", "$defs": own}


def _union(names: list[str]) -> object:
    """Objects, of which each has a kind of its own."""
    options = [_object(["a", "b"], required=["kind", "a"]) for _ in names]
    for name, option in zip(names, options, strict=True):
        option["properties"]["kind"] = {"const": name}
    return {"anyOf": options}


def _rules(row: str, rule: str) -> Text:
    """An EBNF whose root has a row of rules, each with a word of its own."""

    def text(names: list[str]) -> str:
        root = " ".join(row.format(f"r{number}") for number in range(len(names)))
        return "\n".join([f"root ::= {root}", *(f"r{i} ::= {rule.format(name)}" for i, name in enumerate(names))])

    return text


SCHEMAS: Mapping[str, Schema] = {
    "n optional properties": _object,
    "n required properties": lambda n: _object(n, required=n),
    "n properties, of which one in ten is required": lambda n: _object(n, required=n[9::10]),
    "n optional properties and others": lambda n: _object(n, additionalProperties=True),
    "n properties, of which one in ten is required, and others": lambda n: _object(
        n, required=n[9::10], additionalProperties={"type": "integer"}
    ),
    "n optional properties beside a pattern of others": lambda n: _object(n, patternProperties={"^x-": {}}),
    "n optional properties beside a pattern that they match": lambda n: _object(n, patternProperties={"^[a-z_]+$": {}}),
    "an array of n optional items": lambda n: {"type": "array", "prefixItems": [{"const": name} for name in n]},
    "enum of n words": lambda n: {"enum": n},
}
FEWER_SCHEMAS: Mapping[str, Schema] = {
    "an object of n objects": lambda n: _object([]) | {"properties": {name: _object(["a", name]) for name in n}},
    "n definitions, each in the one before": _definitions,
    "anyOf of n objects": _union,
}
REGEXES: Mapping[str, Text] = {
    "a? n times": lambda n: "a?" * len(n),
    "a*b*, n stars": lambda n: "a*b*" * (len(n) // 2),
    "n optional words": lambda n: "".join(f"({name})?" for name in n),
    "n optional words or numbers": lambda n: "".join(f"({name}|[0-9]{{1,2}})?" for name in n),
}
DEEP_REGEXES: Mapping[str, Text] = {
    "(a(b(c)?)?)? n levels deep": lambda n: "(a" * len(n) + ")?" * len(n),
    "(((a)?b?)?c?)? n levels deep": lambda n: "(" * len(n) + "a" + ")?b?" * len(n),
}
EBNFS: Mapping[str, Text] = {
    "EBNF of n optional words": lambda n: "root ::= " + " ".join(f'"{name}"?' for name in n),
    "EBNF of n optional rules": _rules("{}?", '"{}" [0-9]+'),
    "EBNF of n rules that may be empty": _rules("{}", '("{}" [0-9]+)?'),
}


def _compile(kind: GrammarKind, text: Text, **options: Any) -> Callable[[int], Calls]:
    def calls(size: int) -> Calls:
        spec = GrammarSpec(kind, text(words(size)), **options)
        yield lambda: compile_tables(spec).num_bytes

    return calls


def _json_schema(schema: Schema, **options: Any) -> Callable[[int], Calls]:
    return _compile("json_schema", lambda names: json.dumps(schema(names)), **options)


def _curve(name: str, sizes: tuple[int, ...], calls: Callable[[int], Calls]) -> Curve:
    return Curve(name, sizes, calls, max_stall_ms=None)


CURVES = (
    *(_curve(name, SIZES, _json_schema(schema)) for name, schema in SCHEMAS.items()),
    _curve("n optional properties in any order", SIZES, _json_schema(_object, property_order="free")),
    *(_curve(name, FEWER, _json_schema(schema)) for name, schema in FEWER_SCHEMAS.items()),
    _curve("an object in n objects", DEEP, _json_schema(_nested)),
    *(_curve(name, SIZES, _compile("regex", text)) for name, text in REGEXES.items()),
    *(_curve(name, DEEP, _compile("regex", text)) for name, text in DEEP_REGEXES.items()),
    *(_curve(name, SIZES, _compile("ebnf", text)) for name, text in EBNFS.items()),
)
