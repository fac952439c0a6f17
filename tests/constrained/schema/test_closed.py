"""Objects whose schema declares members and says nothing about others."""

import json
from typing import Any

import jsonschema
import pytest

from jsg.constrained.compiler import compile_tables
from jsg.constrained.run.machine import Machine
from jsg.constrained.schema.front import schema_grammar
from jsg.types import AdditionalProperties, GrammarSpec
from tests.constrained import texts

A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}}
DEFS: dict[str, Any] = {"$defs": {"A": A, "B": B}}
REF_A, REF_B = {"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}

OBJECTS = ["{}", *(f'{{{", ".join(f"{name!r}: 1" for name in names)}}}'.replace("'", '"') for names in
    ("a", "b", "x", "y", "ab", "ax", "bx", "xy"))]  # fmt: skip

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "nothing is said": (A, "- a"),
    "no member is declared": (A | {"properties": {}}, "-"),
    "a bare object": ({"type": "object"}, "- a b x y ab ax bx xy"),
    "a bare object with a count": ({"type": "object", "minProperties": 2}, "ab ax bx xy"),
    "others are allowed": (A | {"additionalProperties": True}, "- a b x y ab ax bx xy"),
    "others are described": (A | {"additionalProperties": {"type": "string"}}, "- a"),
    "others are allowed after evaluation": (A | {"unevaluatedProperties": True}, "- a b x y ab ax bx xy"),
    "others are described after evaluation": (
        {"allOf": [A, B], "unevaluatedProperties": {"type": "integer"}},
        "- a b x y ab ax bx xy",
    ),
    "others are forbidden after evaluation": ({"allOf": [A, B], "unevaluatedProperties": False}, "- a b ab"),
    "a required name is not declared": (A | {"required": ["x"]}, "x ax"),
    "patterns": (A | {"patternProperties": {"^y": {"type": "integer"}}}, "- a y"),
    "patterns alone": ({"patternProperties": {"^[xy]": {}}}, "- x y xy"),
    "names are described": (A | {"propertyNames": {"pattern": "[ax]"}}, "- a x ax"),
    "names are listed": (A | {"propertyNames": {"enum": ["a", "b"]}}, "- a b ab"),
    "more members are needed than are declared": (A | {"minProperties": 2}, "ab ax bx xy"),
    "as many members are needed as are declared": (A | {"minProperties": 1}, "a"),
    "allOf": ({"allOf": [A, B]}, "- a b ab"),
    "allOf, of which one is open": ({"allOf": [A, B | {"additionalProperties": True}]}, "- a b x y ab ax bx xy"),
    "allOf with a bare object": ({"allOf": [A, {"type": "object"}]}, "- a"),
    "a reference beside properties": (DEFS | A | REF_B, "- a b ab"),
    "anyOf beside properties": (A | {"anyOf": [B, {"required": ["x"]}]}, "- a b x ab ax"),
    "anyOf of a schema and of what extends it": (DEFS | {"anyOf": [REF_A, {"allOf": [REF_A, B]}]}, "- a b ab"),
    "oneOf": ({"oneOf": [A | {"required": ["a"]}, B | {"required": ["b"]}]}, "a b"),
    "dependentSchemas": (A | {"dependentSchemas": {"a": B}}, "- a ab"),
    "if": (A | {"if": {"required": ["a"]}, "then": B}, "- a ab"),
    "what `not` names is not declared": ({"type": "object", "not": {"required": ["b"]}}, "- a x y ax xy"),
    "a member that must be wrong": (A | {"not": {"patternProperties": {"^x": {"type": "string"}}}}, "x ax"),
    "a value is listed": (A | {"enum": [{"a": 1, "x": 1}]}, "ax"),
}
"""A schema, and the names in the objects of integers that it allows; `-` is the empty object."""


def machine(schema: object, additional_properties: AdditionalProperties = "closed") -> Machine:
    return texts.machine_of(schema_grammar(json.dumps(schema), additional_properties=additional_properties))


@pytest.mark.parametrize(("schema", "expected"), CASES.values(), ids=CASES)
def test_closed(schema: dict[str, Any], expected: str) -> None:
    closed = machine(schema)
    found = ["".join(json.loads(text)) or "-" for text in OBJECTS if texts.accepts(closed, text)]
    assert found == expected.split()
    validator = jsonschema.Draft202012Validator(schema)
    assert all(validator.is_valid(json.loads(text)) for text in OBJECTS if texts.accepts(closed, text))


def test_objects_within() -> None:
    schema = {"type": "array", "items": A | {"properties": {"a": B, "c": {"type": "object"}}}}
    for text, expected in {
        '[{"a": {"b": 1}}, {}]': True,
        '[{"a": {"b": 1, "x": 1}}]': False,
        '[{}, {"x": 1}]': False,
        '[{"c": {"x": {"y": 1}}}]': True,
    }.items():
        assert texts.accepts(machine(schema), text) == expected, text
        assert texts.accepts(machine(schema, "open"), text), text


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_the_option_of_a_grammar(kind: str) -> None:
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": A}}
    text = json.dumps(A if kind == "json_schema" else tag)
    for option, is_open in (({}, False), ({"additional_properties": "open"}, True)):
        found = Machine(compile_tables(GrammarSpec(kind, text, **option)))  # pyright: ignore[reportArgumentType]
        assert texts.accepts(found, '{"a": 1, "x": 1}') == is_open
