"""Rules of a library, which are built once: tables with them are as large and read as when all rules are built anew."""

import dataclasses
import json

import pytest

from jsg.constrained.build import builder
from jsg.constrained.build.builder import build
from jsg.constrained.run.machine import Machine
from jsg.constrained.schema.front import schema_grammar

AMBIGUOUS = {"anyOf": [{"type": "integer"}, {"type": "number", "multipleOf": 7}, {"type": "number"}]}
SCHEMAS = {
    "any value": True,
    "plain": {"properties": {"a": {"type": "string"}, "b/c": {"type": "number"}}, "required": ["a"]},
    "array": {"type": "array", "items": {"type": ["integer", "string"]}},
    "recursive": {"properties": {"a": {"$ref": "#"}, "b": True}, "minProperties": 1},
    "several counts": AMBIGUOUS,
    "no library": {"type": "boolean"},
}


def sizes(tables):
    return [len(tables.positions), len(tables.list_items), len(tables.loops), tables.num_rules, tables.sets.shape]


@pytest.mark.parametrize("order", ["free", "declared"])
@pytest.mark.parametrize("whitespace", ["flexible", "fixed"])
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_a_library_saves_only_work(schema, whitespace, order):
    grammar = schema_grammar(json.dumps(schema), whitespace, order)
    assert grammar.library is not None
    taken, anew = build(grammar), build(dataclasses.replace(grammar, library=None))
    assert sizes(taken) == sizes(anew)
    for step in (3, 5, 7):  # three texts, which differ in the bytes that are chosen
        machines = Machine(taken), Machine(anew)
        configs = [machine.start() for machine in machines]
        for place in range(40):
            allowed, others = (m.allowed_bytes(config) for m, config in zip(machines, configs, strict=True))
            assert allowed == others
            if not allowed:
                break
            byte = bytes([sorted(allowed)[place * step % len(allowed)]])
            configs = [m.advance(config, byte) for m, config in zip(machines, configs, strict=True)]


def test_a_grammar_has_only_the_rules_that_it_needs():
    grammar = schema_grammar('{"type": "array", "items": {"type": "string"}}')
    assert set(grammar.rules) == {"#", "string", "rest of a string"}


def test_a_selection_of_a_library_is_built_once(monkeypatch):
    """Grammars that need the same rules of the library begin with the same rows, which no grammar changes."""
    grammars = [schema_grammar(json.dumps({"properties": {name: {"type": "string"}}})) for name in ("a", "bb", "a")]
    first, other, again = map(build, grammars)
    size = min(len(first.positions), len(other.positions)) // 2
    assert (first.positions[:size] == other.positions[:size]).all() and first.to_bytes() == again.to_bytes()
    built = []
    monkeypatch.setattr(builder._Builder, "taken", lambda *_: built.append(1))
    build(schema_grammar('{"properties": {"c": {"type": "string"}}}'))
    assert not built
