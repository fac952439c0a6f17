"""Random texts of the grammars of public schemas, in all white space and both orders: each must be valid.

Each must be JSON, `jsonschema` must find nothing, and no beginning of one may lead to where nothing can follow.

What `jsonschema` has wrong, or sees otherwise, is put right in `aids.Judge`, not excused here. One thing is excused: a
grammar does not know which undeclared names an object already has, so a text may repeat one. Readers keep the last
member of a name; that is valid by itself, as all are, but then there are fewer members than `minProperties` counted.
"""

import collections
import itertools
import json
import pathlib
import random
import re
from collections.abc import Callable, Iterable

import pytest

from tests.constrained import aids, scoreboard

type Data = Callable[[str], pathlib.Path]
type Counts = collections.Counter[str]

SETTINGS = tuple(itertools.product(aids.WHITESPACES, aids.ORDERS))


def _walk(cases: Iterable[scoreboard.Case], count: int, settings: int = len(SETTINGS)) -> Counts:
    """Walks `count` times through each schema's grammar in `settings` of the settings, which take turns.

    Returns:
        How many grammars were walked through, texts came to an end, and walks did not.
    """
    counts: Counts = collections.Counter()
    for number, case in enumerate(cases):
        try:
            judge = aids.Judge(case.schema)
        except re.error:
            assert r"\p{" in json.dumps(case.schema).replace("\\\\", "\\"), case.name  # Python knows no properties
            continue
        names = aids.required_names(case.schema)
        for turn in range(settings):
            whitespace, order = SETTINGS[(number + turn) % len(SETTINGS)]
            machine = aids.machine_of(case.schema, whitespace, order)
            if machine is None:
                continue
            counts["grammars"] += 1
            for i in range(count):
                text = aids.walk(machine, random.Random(f"{case.name} {whitespace} {order} {i}"), names)
                counts["texts" if text is not None else "without end"] += 1
                if text is not None:
                    counts["excused"] += _check(judge, case, text.decode(), f"{whitespace} {order}")
    return counts


def _check(judge: aids.Judge, case: scoreboard.Case, text: str, setting: str) -> bool:
    """Asserts that a text is valid; True where it is not, and that is excused."""
    error = judge.error(text)
    if error is not None and '"minProperties"' in json.dumps(case.schema) and aids.repeats_a_name(text):
        return True
    assert error is None, (case.name, setting, text, error)
    return False


SCHEMAS = {
    "members": {
        "properties": {"a": {"type": "integer"}, "b": {"enum": [1, "x", None]}},
        "patternProperties": {"^x": {"type": "boolean"}},
        "additionalProperties": {"type": "string", "maxLength": 3},
        "type": "object",
    },
    "count of members": {"type": "object", "minProperties": 2, "maxProperties": 3},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 1e3}},
    "multiples": {"type": "array", "items": {"type": "number", "multipleOf": 0.15, "maximum": 77}, "maxItems": 3},
    "strings": {"type": "string", "pattern": r"^\d{2}.\s\S[a-f]+$", "maxLength": 12},
    "not": {"not": {"enum": [1, "a", [], {}]}, "type": ["integer", "string"]},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 10, "not": {"type": "integer"}}]},
    "tree": {"type": "object", "properties": {"kids": {"items": {"$ref": "#"}}, "n": {"const": 1}}, "required": ["n"]},
    "formats": {"items": {"anyOf": [{"format": f} for f in ("date", "uuid", "ipv4", "ipv6")], "type": "string"}},
    "names": {"propertyNames": {"pattern": "^.{1,3}$"}, "type": "object", "minProperties": 1},
    "if": {"if": {"properties": {"k": {"const": 1}}, "required": ["k"]}, "then": {"required": ["v"]}, "type": "object"},
    "not items": {"type": "array", "not": {"items": {"const": 7}}, "maxItems": 6},
    "any": True,
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_of_a_schema_are_valid(name: str) -> None:
    counts = _walk([scoreboard.Case("", name, SCHEMAS[name], ())], 6)
    assert counts["grammars"] == len(SETTINGS)
    assert counts["texts"] > 5 * counts["without end"] + 20, counts
    assert counts["excused"] < (0.25 * counts["texts"] if name in ("count of members", "names") else 1)


def test_texts_of_some_of_maskbench_are_valid(shared_data: Data) -> None:
    counts = _walk(aids.maskbench(shared_data("maskbench-dev.jsonl").parent, 6, 1), 1, 1)
    assert counts["grammars"] > 150 and counts["texts"] > 4 * counts["without end"], counts
    assert counts["excused"] <= 5


@pytest.mark.slow
@pytest.mark.long
def test_texts_of_maskbench_are_valid(shared_data: Data) -> None:
    """Twice as many schemas as the test before, and each in every setting."""
    counts = _walk(aids.maskbench(shared_data("maskbench-dev.jsonl").parent, 6, 2), 1)
    assert counts["grammars"] > 150 * len(SETTINGS) and counts["texts"] > 4 * counts["without end"], counts


def test_texts_of_some_of_the_test_suite_are_valid(shared_data: Data) -> None:
    data = shared_data("json-schema-test-suite").parent
    counts = _walk(list(scoreboard.json_schema_suite(data))[::2], 2, 1)
    assert counts["grammars"] > 280 and counts["texts"] > 10 * counts["without end"], counts
    assert counts["excused"] <= 5


@pytest.mark.slow
@pytest.mark.long
def test_texts_of_the_test_suite_are_valid(shared_data: Data) -> None:
    """Twice as many schemas as the test before, and each in every setting."""
    data = shared_data("json-schema-test-suite").parent
    counts = _walk(scoreboard.json_schema_suite(data), 3)
    assert counts["grammars"] > 550 * len(SETTINGS) and counts["texts"] > 10 * counts["without end"], counts


# -- The oracle itself


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "1.5"),
        ({"multipleOf": 0.1}, "0.35"),
        ({"maximum": 0.3}, "0.30000000000000000001"),
        ({"exclusiveMaximum": 0.3}, "0.29999999999999999999"),  # the bound itself, to who reads doubles
        ({"not": {"const": 1}}, "1.0"),
        ({"pattern": "^a$"}, r'"a\n"'),
        ({"pattern": "^a.b$"}, r'"a\rb"'),
        ({"pattern": r"^\w$"}, '"é"'),
        ({"pattern": r"^[^\s]$"}, r'"\ufeff"'),
        ({"patternProperties": {r"^\S$": False}}, '{"a": 1}'),
        ({"format": "date"}, '"2023-02-29"'),
        ({"minProperties": 2}, '{"a": 1, "a": 2}'),
        ({"uniqueItems": True}, "[1, 1.0]"),
    ],
)
def test_the_judge_finds_what_is_not_valid(schema: object, text: str) -> None:
    assert aids.Judge(schema).error(text) is not None


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"multipleOf": 0.1}, "0.3"),
        ({"multipleOf": 0.01}, "123456789012345678901234567890.12"),
        ({"type": "integer"}, "1e3"),
        ({"pattern": r"^\s$"}, r'"\ufeff"'),
        ({"pattern": r"^[\d$.]+\.$"}, '"1$.."'),
        ({"pattern": r"^\cJ(?<x>a)$"}, r'"\na"'),
        ({"properties": {"pattern": {"enum": ["$"]}}}, '{"pattern": "$"}'),
    ],
)
def test_the_judge_lets_pass_what_is_valid(schema: object, text: str) -> None:
    assert aids.Judge(schema).error(text) is None


def test_a_dead_end_is_found() -> None:
    class Stuck:
        def start(self) -> tuple[()]:
            return ()

        def allowed_bytes(self, _: object) -> set[int]:
            return set()

        def is_accepting(self, _: object) -> bool:
            return False

    with pytest.raises(aids.DeadEnd):
        aids.walk(Stuck(), random.Random(0), [])  # pyright: ignore[reportArgumentType]
