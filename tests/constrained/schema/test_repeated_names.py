"""A name that is written twice never makes a value invalid, whether a reader keeps the first or the last member."""

import itertools
import json
from collections.abc import Iterator

import jsonschema
import pytest

from jsg.errors import GrammarError
from tests.constrained.schema.emitted import accepts, machine, verdicts

STRING, INTEGER = {"type": "string"}, {"type": "integer"}
SCHEMAS = {
    "not additionalProperties": {"type": "object", "not": {"additionalProperties": STRING}},
    "not patternProperties": {"type": "object", "not": {"patternProperties": {"^a": STRING}}},
    "not patternProperties beside patterns": {
        "type": "object",
        "patternProperties": {"a": {"type": ["integer", "string"]}},
        "not": {"patternProperties": {"^a": STRING}},
    },
    "not propertyNames": {"type": "object", "not": {"propertyNames": {"maxLength": 1}}},
    "two that must be there": {
        "type": "object",
        "allOf": [{"not": {"patternProperties": {"a": STRING}}}, {"not": {"patternProperties": {"b": INTEGER}}}],
    },
    "two of which one is narrower": {
        "type": "object",
        "allOf": [{"not": {"patternProperties": {"a": STRING}}}, {"not": {"patternProperties": {"^a": {"const": 1}}}}],
    },
    "not const": {"type": "object", "not": {"const": {"a": 1}}},
    "not enum": {"type": "object", "not": {"enum": [{"a": 1}, {"b": 1}, {}]}},
    "minProperties": {"type": "object", "minProperties": 2},
    "minProperties beside declared names": {"type": "object", "properties": {"a": INTEGER}, "minProperties": 3},
    "minProperties beside required names": {
        "type": "object",
        "properties": {"a": INTEGER},
        "required": ["a"],
        "minProperties": 3,
        "maxProperties": 3,
    },
    "minProperties of names that match": {
        "type": "object",
        "patternProperties": {"^[ab]": INTEGER},
        "additionalProperties": False,
        "minProperties": 2,
    },
    "not maxProperties": {"type": "object", "not": {"maxProperties": 1}},
    "not oneOf of what must be there": {
        "type": "object",
        "oneOf": [{"not": {"additionalProperties": STRING}}, {"not": {"additionalProperties": INTEGER}}],
    },
    "if": {
        "type": "object",
        "if": {"additionalProperties": STRING},
        "then": {"maxProperties": 1},
        "else": {"maxProperties": 2},
    },
    "dependentSchemas": {
        "type": "object",
        "dependentSchemas": {"a": {"minProperties": 3}, "b": {"not": {"additionalProperties": INTEGER}}},
    },
}
MEMBERS = [(name, value) for name in ("a", "ab", "b") for value in (1, 2, "x")]


def texts() -> Iterator[str]:
    """Objects of up to three members: all of up to two, and every fourth of three."""
    for count in range(4):
        for row in itertools.islice(itertools.product(MEMBERS, repeat=count), 0, None, 4 if count == 3 else 1):
            yield "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in row) + "}"


def first(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object as a reader has it that keeps the first of two members with one name."""
    return dict(reversed(pairs))


@pytest.mark.parametrize("order", ["declared", "free"])
@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_taken_is_valid_for_both_readers(name: str, order: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    taken = verdicts(schema, list(texts()), order=order)
    assert any(len(json.loads(text)) > 1 for text in taken)
    for text in taken:
        assert validator.is_valid(json.loads(text)), text
        assert validator.is_valid(json.loads(text, object_pairs_hook=first)), text


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("not additionalProperties", "with"),
        ("not patternProperties", "with"),
        ("not propertyNames", "none"),
        ("not const", "none"),
        ("not enum", "none"),
        ("minProperties", "none"),
        ("minProperties beside declared names", "none"),
        ("not maxProperties", "none"),
    ],
)
def test_what_is_lost_for_it(name: str, lost: str) -> None:
    """Objects without a repeated name that are valid and yet not taken: where all members must serve what one must."""
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema)
    for text in texts():
        value = json.loads(text)
        if len(value) < text.count(":") or not validator.is_valid(value) or accepts(schema, text, order="free"):
            continue
        assert lost == "with", text
        assert len(set(map(type, value.values()))) > 1, text  # some serve, and others do not


def test_many_names_are_counted_or_refused() -> None:
    """Beyond 64 names the optional ones may be repeated in free order, so they cannot be counted."""
    names = [f"n{i}" for i in range(70)]
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "required": names[:2],
        "additionalProperties": False,
    }
    for text in ('{"n0": null, "n1": null, "n5": null}', '{"n5": null, "n5": null, "n0": null, "n1": null}'):
        assert accepts({**schema, "minProperties": 3}, text, order="free")
    assert not accepts({**schema, "minProperties": 3}, '{"n0": null, "n1": null}', order="free")
    with pytest.raises(GrammarError, match=r"minProperties: .* \(in #\)"):
        machine({**schema, "minProperties": 4}, order="free")
    with pytest.raises(GrammarError, match=r"minProperties: .* \(in #\)"):
        machine({**schema, "additionalProperties": True, "minProperties": 4}, order="free")


def test_more_names_than_can_be_told_apart_are_refused() -> None:
    with pytest.raises(GrammarError, match=r"minProperties: 1000 members .* \(in #\)"):
        machine({"type": "object", "minProperties": 1000})


def test_names_of_many_kinds_are_told_apart() -> None:
    schema = {"type": "object", "minProperties": 3, "additionalProperties": INTEGER}
    good = [
        '{"a": 1, "b": 2, "c": 3}',
        '{"item1": 1, "item2": 2, "item3": 3, "item1": 4}',
        '{"width": 1, "height": 2, "depth": 3}',
        '{"": 1, "имя": 2, "возраст": 3}',
        '{"名前": 1, "年齢": 2, "x": 3}',
    ]
    bad = ['{"a": 1, "b": 2}', '{"a": 1, "b": 2, "a": 3}', '{"a": 1, "a": 2, "b": 3, "c": 4}']
    for order in ("declared", "free"):
        assert verdicts(schema, [*good, *bad], order=order) == good
