"""Random texts of grammars against validators, which finds grammars that are too loose, and dead ends."""

import json
import pathlib
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import jsonschema
import pytest

from jsg.constrained.json_input import read_json
from jsg.constrained.limits import LIMITS
from jsg.constrained.schema.front import schema_grammar
from jsg.constrained.schema.normalise import normalise
from jsg.constrained.schema.shapes import NEVER, Object, Shape
from jsg.errors import GrammarError
from tests.constrained import texts
from tests.constrained.schema import shapes_oracle
from tests.constrained.schema.emitted import walks

Data = Callable[[str], pathlib.Path]

SCHEMAS: list[dict[str, Any]] = [
    {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 1, "maximum": 4711},
            "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1},
            "when": {"type": "string", "format": "date"},
            "size": {"type": "number", "exclusiveMinimum": 0, "maximum": 99.5},
            "note": {"type": ["string", "null"], "minLength": 1, "maxLength": 5},
        },
        "required": ["id", "when"],
        "additionalProperties": False,
    },
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "minProperties": 1, "maxProperties": 2},
    {"type": "array", "not": {"items": {"type": "integer"}}, "maxItems": 4},
    {
        "anyOf": [
            {"type": "string", "pattern": "^(a|b)+$"},
            {"type": "number", "multipleOf": 5},
            {"const": [1, {"a": 2}]},
        ]
    },
    {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}},
    {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}, "maxProperties": 3},
    {"type": "string", "not": {"enum": ["ab", "a"]}, "maxLength": 3},
    {"type": "object", "propertyNames": {"pattern": "^[a-c]{1,2}$"}, "additionalProperties": {"type": "boolean"}},
]


@pytest.mark.parametrize("order", ["declared", "free"])
@pytest.mark.parametrize("whitespace", ["fixed", "compact", "flexible"])
@pytest.mark.parametrize("schema", SCHEMAS)
def test_random_texts_are_valid(schema: dict[str, Any], whitespace: str, order: str) -> None:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker(["date"]))
    text = json.dumps(schema)
    document = normalise(read_json(text, "schema", LIMITS))
    automaton = texts.machine_of(schema_grammar(text, whitespace, order))  # pyright: ignore[reportArgumentType]
    count = 0
    for found in walks(automaton, 40):
        validator.validate(json.loads(found))
        assert shapes_oracle.is_valid(document, shapes_oracle.parse(found)), found
        count += 1
    assert count >= 20


def _compiled(data: pathlib.Path, share: int) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Every n-th schema of MaskBench that compiles: its name, the schema, and its machine."""
    lines = data.read_text().splitlines()[::share]
    for line in lines:
        case = json.loads(line)
        try:
            automaton = texts.machine_of(schema_grammar(json.dumps(case["schema"]), "flexible", "free"))
        except GrammarError:
            continue
        yield case["name"], case, automaton


def _check(data: pathlib.Path, share: int, count: int) -> int:
    total = 0
    for name, case, automaton in _compiled(data, share):
        for test in case["tests"]:
            for text in (json.dumps(test["data"]), json.dumps(test["data"], ensure_ascii=False, separators=(",", ":"))):
                if texts.accepts(automaton, text):
                    assert test["valid"], (name, text)
        text = json.dumps(case["schema"])
        document = normalise(read_json(text, "schema", LIMITS))
        if any(_has_no_others(shape) for shapes in document.nodes.values() for shape in shapes):
            continue  # The oracle wants members that must be there to be valid as any others too.
        for found in walks(automaton, count):
            for pairs_of in (dict, _first):
                value = json.loads(found, parse_float=Decimal, object_pairs_hook=pairs_of)
                assert shapes_oracle.is_valid(document, value), (name, found)
            total += 1
    return total


def _has_no_others(shape: Shape) -> bool:
    """Whether it is an object of members that must be there and no other ones."""
    return isinstance(shape, Object) and bool(shape.some) and not shape.patterns and shape.additional == NEVER


def _first(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object as a reader has it that keeps the first of two members with one name."""
    return dict(reversed(pairs))


def test_maskbench_sample(shared_data: Data) -> None:
    assert _check(shared_data("maskbench-dev.jsonl"), 29, 3) > 50


@pytest.mark.slow
@pytest.mark.long
def test_maskbench(shared_data: Data) -> None:
    assert _check(shared_data("maskbench-dev.jsonl"), 5, 6) > 600
