"""Objects with many members that may be left out: closed, open, with patterns, inside of each other and in unions.

A text must be taken if its value is valid and its members stand in declared order with the others behind them, and must
be refused if its value is not valid, as `jsonschema` says.
"""

import functools
import itertools
import json
import random
from typing import Any

import jsonschema
import pytest

from jsg.constrained.build.builder import build
from jsg.constrained.schema.front import schema_grammar
from jsg.errors import GrammarError
from tests.constrained import texts
from tests.constrained.schema import emitted

VALUES: dict[str, list[Any]] = {"integer": [0, 7], "string": ["", "s"], "boolean": [True]}
OTHERS: list[dict[str, Any]] = [
    {"additionalProperties": False},
    {"additionalProperties": False},
    {"additionalProperties": True},
    {"additionalProperties": {"type": "integer"}},
    {"additionalProperties": False, "patternProperties": {"^x": {"type": "integer"}}},
    {"additionalProperties": {"type": "string"}, "patternProperties": {"^[bx]+$": {"type": "integer"}}},
]


def _names(chance: random.Random, most: int) -> list[str]:
    return list({"".join(chance.choices("abx", k=chance.randint(1, 4))): None for _ in range(chance.randint(1, most))})


def _schema(chance: random.Random, depth: int = 2) -> dict[str, Any]:
    kind = chance.random()
    if depth == 0 or (depth == 1 and kind < 0.6):
        return {"type": chance.choice(list(VALUES))}
    if kind > 0.85:
        return {"anyOf": [_schema(chance, depth - 1 + (depth == 2)) for _ in range(2)]}
    names = _names(chance, 24 if depth == 2 else 4)
    properties = {name: _schema(chance, depth - 1) for name in names}
    required = [name for name in names if chance.random() < chance.choice((0, 0, 0.1, 0.5))]
    return {"type": "object", "properties": properties, "required": required, **chance.choice(OTHERS)}


def _value(schema: dict[str, Any], chance: random.Random) -> Any:
    """A value that is nearly right, with its members in order."""
    if "anyOf" in schema:
        return _value(chance.choice(schema["anyOf"]), chance)
    if schema["type"] != "object" or chance.random() < 0.03:
        return chance.choice(
            VALUES[chance.choice([schema["type"]] * 9 + ["integer"]) if schema["type"] in VALUES else "string"]
        )
    haste = chance.choice((0.1, 0.5, 0.9))
    kept = [
        n
        for n in schema["properties"]
        if chance.random() > haste or (n in schema["required"] and chance.random() < 0.95)
    ]
    value = {name: _value(schema["properties"][name], chance) for name in kept}
    others = _names(chance, 3) if chance.random() < 0.5 else []
    return value | {n: chance.choice((1, 1, "s")) for n in others if n not in schema["properties"]}


def _is_in_order(schema: dict[str, Any], value: Any) -> bool:
    """Whether a value is valid, and all members are in the order of one of the schema's options."""
    if "anyOf" in schema:
        return any(_is_in_order(option, value) for option in schema["anyOf"])
    if not isinstance(value, dict) or schema["type"] != "object":
        return jsonschema.Draft202012Validator(schema).is_valid(value)
    own = [name for name in schema["properties"] if name in value]
    return (
        list(value)[: len(own)] == own
        and jsonschema.Draft202012Validator(schema | {"properties": dict.fromkeys(own, True)}).is_valid(value)
        and all(_is_in_order(schema["properties"][name], value[name]) for name in own)
    )


def _read(seed: int) -> int:
    """Compares the verdicts on texts of a random schema; how many of them had to be taken."""
    chance = random.Random(seed)
    schema, num_taken = _schema(chance), 0
    try:
        machine = emitted.machine(schema)
    except GrammarError as error:
        if "no value is valid" not in str(error):
            raise
        return 0
    for _ in range(25):
        value = _value(schema, chance)
        text = json.dumps(value)
        if _is_in_order(schema, value):
            assert texts.accepts(machine, text), (schema, text)
            num_taken += 1
        elif not jsonschema.Draft202012Validator(schema).is_valid(value):
            assert not texts.accepts(machine, text), (schema, text)
    return num_taken


def test_random_objects_are_read_as_they_are_valid():
    assert sum(_read(seed) for seed in range(15)) > 60


@pytest.mark.slow
def test_many_random_objects_are_read_as_they_are_valid():
    assert sum(_read(seed) for seed in range(15, 400)) > 1500


@pytest.mark.parametrize("pattern", ["^x", "b", "^[ab]+$", "^(?!a)", "x-|^$"])
@pytest.mark.parametrize("names", [[], ["a", "ab", "abx", "x", "b-"], ["xa", "xb", "bb", "ax", "bxa", ""]])
def test_each_short_name_beside_a_pattern(pattern: str, names: list[str]):
    schema = {
        "type": "object",
        "properties": {name: {"const": 1} for name in names},
        "patternProperties": {pattern: {"enum": [1, "p"]}},
        "additionalProperties": {"const": True},
    }
    machine, validator = emitted.machine(schema), jsonschema.Draft202012Validator(schema)
    for length in range(4):
        for signs in itertools.product("abx-", repeat=length):
            for value in (1, "p", True):
                given = {"".join(signs): value}
                assert texts.accepts(machine, json.dumps(given)) == validator.is_valid(given), (pattern, given)


def _many(number: int, **keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"{i * 7919 % 100_003:05}": {} for i in range(number)}, **keywords}


@pytest.mark.parametrize("order", ["declared", "free"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"additionalProperties": False},
        {"additionalProperties": True},
        {"additionalProperties": {"type": "integer"}},
        {"additionalProperties": False, "patternProperties": {"^x-": {}}},
        {"additionalProperties": False, "patternProperties": {"^[0-9]+$": {}}},
        {"additionalProperties": False, "propertyNames": {"pattern": "^[0-9]+$"}},
    ],
    ids=json.dumps,
)
def test_tables_are_as_long_as_the_members(keywords: dict[str, Any], order: Any):
    few, many = (build(schema_grammar(json.dumps(_many(number, **keywords)), "fixed", order)) for number in (80, 320))
    assert many.num_positions < 4.4 * few.num_positions and len(many.list_items) < 5 * len(few.list_items)


def test_thousands_of_names_stand_beside_a_pattern():
    for pattern in ("^x-", "^[0-9]+$"):
        schema = _many(2500, additionalProperties=False, patternProperties={pattern: {"const": 1}})
        machine = functools.partial(texts.accepts, emitted.machine(schema))
        assert machine('{"00000": 1, "07919": 1}') and not machine('{"00001": 2}')
