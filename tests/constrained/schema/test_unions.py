"""Unions of many kinds: no mask leaves an alternative out, wherever the member is that tells the kinds apart."""

import itertools
import json
import random
from typing import Any, Literal, NamedTuple

import jsonschema
import numpy as np
import pytest

from jsg.constrained.compiler import compile_grammar, compile_tables
from jsg.constrained.run.machine import Machine
from jsg.types import GrammarSpec, PropertyOrder
from tests.constrained.texts import accepts
from tests.constrained.vocabularies import odd_vocabulary, tokenize

Tag = Literal["first", "middle", "last"]
Value = tuple[dict[str, Any], Any]
"""A schema and a value that is valid for it."""
MOST_SCALARS = 8


class Form(NamedTuple):
    """What a union is like."""

    num_kinds: int
    tag: Tag = "last"
    depth: int = 0
    is_recursive: bool = False
    order: PropertyOrder = "declared"
    keyword: str = "anyOf"


class Union:
    """A random union of objects. `values` has a valid value for each of its alternatives."""

    def __init__(self, form: Form, seed: int):
        self._form, self._chance = form, random.Random(f"{form} {seed}")
        kinds = [self._kind(number, form.depth) for number in range(form.num_kinds)]
        self.values = [value for _, value in kinds]
        self.schema = {
            "$defs": {f"kind{number}": schema for number, (schema, _) in enumerate(kinds)},
            form.keyword: [{"$ref": f"#/$defs/kind{number}"} for number in range(form.num_kinds)],
        }

    def _kind(self, number: int, depth: int) -> Value:
        """One alternative. Its kind is in a member `kind`, beside members that other kinds have too or do not have."""
        names = self._chance.sample("abcdef", self._chance.randint(1, 3))
        members = {name: self._value(number, depth) for name in names}
        if self._chance.random() < 0.3:
            members[f"own{number}"] = self._value(number, depth)
        if self._form.is_recursive:
            members["again"] = self._again(number)
        order = list(members)
        place = {"first": 0, "last": len(order), "middle": len(order) // 2}[self._form.tag]
        order.insert(place, "kind")
        members["kind"] = {"const": f"k{number}"}, f"k{number}"
        optional = [name for name in order if name != "kind" and self._chance.random() < 0.2]
        schema = {
            "type": "object",
            "properties": {name: members[name][0] for name in order},
            "required": [name for name in order if name not in optional],
            "additionalProperties": False,
        }
        if self._form.order == "free":
            self._chance.shuffle(order)
        return schema, {name: members[name][1] for name in order}

    def _again(self, number: int) -> Value:
        own = {"$ref": f"#/$defs/kind{number % self._form.num_kinds}"}
        match self._chance.randrange(4):
            case 0:
                return {"anyOf": [{"type": "null"}, own]}, None
            case 1:
                return {"anyOf": [own, {"type": "null"}]}, None
            case 2:
                return {"type": "array", "items": own}, []
            case _:
                return {"type": "array", "items": {"$ref": "#"}, "maxItems": 2 + number}, []

    def _value(self, number: int, depth: int) -> Value:
        if depth and self._chance.random() < 0.7:
            match self._chance.randrange(3):
                case 0:
                    num_kinds = self._chance.choice([3, 40]) if depth == self._form.depth else 3
                    parts = [self._kind(inner, depth - 1) for inner in range(num_kinds)]
                    return {"anyOf": [schema for schema, _ in parts]}, self._chance.choice(parts)[1]
                case 1:
                    schema, value = self._kind(number, depth - 1)
                    return {"type": "array", "items": schema, "maxItems": 1 + number}, [value]
                case _:
                    names = self._chance.sample(["x", "y", "z", f"n{number}"], 2)
                    parts = {name: self._value(number, depth - 1) for name in names}
                    properties = {name: schema for name, (schema, _) in parts.items()}
                    schema = {"type": "object", "properties": properties, "additionalProperties": False}
                    return schema, {name: value for name, (_, value) in parts.items()}
        return self._scalar(number)

    def _scalar(self, number: int) -> Value:
        return [
            ({"type": "string"}, "some text"),
            ({"type": "string", "maxLength": 20 + number}, "words"),
            ({"type": "string", "pattern": f"^[a-z]{{1,{3 + number}}}$"}, "abc"),
            ({"type": "integer", "minimum": number}, 900 + number),
            ({"type": "number"}, -2.5),
            ({"enum": ["red", f"green{number}"]}, f"green{number}"),
            ({"type": ["boolean", "null"]}, True),
            ({"type": "array", "items": {"type": "string"}, "maxItems": 70 + number}, ["p", "q"]),
        ][self._chance.randrange(MOST_SCALARS)]


def _check(form: Form, seed: int, num_walked: int = 3) -> None:
    """Reads a value of each alternative, some of them by tokens too, and some with the kind of another alternative."""
    union = Union(form, seed)
    spec = GrammarSpec("json_schema", json.dumps(union.schema), property_order=form.order)
    machine, validator = Machine(compile_tables(spec)), jsonschema.Draft202012Validator(union.schema)
    for value in union.values:
        assert accepts(machine, json.dumps(value)), (form, seed, value)
    chance = random.Random(seed)
    for number in chance.sample(range(form.num_kinds), 15):
        other = union.values[number] | {"kind": f"k{(number + 1) % form.num_kinds}"}
        assert accepts(machine, json.dumps(other)) == validator.is_valid(other), (form, seed, other)
    vocabulary = odd_vocabulary()
    grammar, mask = compile_grammar(spec, vocabulary), np.zeros(vocabulary.num_words, np.uint32)
    for value in [union.values[-1], *chance.sample(union.values, num_walked - 1)]:
        masker = grammar.new_masker()
        for token in tokenize(vocabulary, json.dumps(value).encode()):
            masker.fill_mask(mask)
            assert mask[token >> 5] >> (token & 31) & 1, (form, seed, value)
            assert masker.accept(token)
        assert masker.is_complete()


@pytest.mark.parametrize("order", ["declared", "free"])
def test_forty_tools_whose_name_comes_last(order: PropertyOrder):
    kinds = [
        {
            "type": "object",
            "properties": {
                "args": {"type": "object", "properties": {f"f{i}": {"type": "integer"}}},
                "tool": {"const": f"k{i}"},
            },
            "required": ["args", "tool"],
        }
        for i in range(40)
    ]
    machine = Machine(compile_tables(GrammarSpec("json_schema", json.dumps({"anyOf": kinds}), property_order=order)))
    for i in range(40):
        assert accepts(machine, f'{{"args": {{"f{i}": 1}}, "tool": "k{i}"}}')
        assert not accepts(machine, f'{{"args": {{"f{i}": 1}}, "tool": "k{(i + 1) % 40}"}}')
        assert accepts(machine, f'{{"tool": "k{i}", "args": {{}}}}') == (order == "free")


@pytest.mark.parametrize(
    "form",
    [
        Form(35),
        Form(35, tag="middle", order="free"),
        Form(34, depth=1, tag="first", order="free"),
        Form(34, is_recursive=True, keyword="oneOf"),
    ],
)
def test_every_alternative_of_a_union_can_be_written(form: Form):
    _check(form, 0, num_walked=2)


GRID = itertools.product(["first", "middle", "last"], [0, 1, 2], [False, True], ["declared", "free"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tag", "depth", "is_recursive", "order"),
    [pytest.param(*case, marks=[] if case[0] == "last" else [pytest.mark.long]) for case in GRID],
)
def test_every_alternative_of_many_unions_can_be_written(
    tag: Tag, depth: int, is_recursive: bool, order: PropertyOrder
):
    for seed, num_kinds in enumerate([[20, 70, 200], [40], [20]][depth]):
        _check(Form(num_kinds, tag, depth, is_recursive, order, ["anyOf", "oneOf"][seed % 2]), seed)
