"""Proofs that a repeat has one count. What is proved is true, and numbers and strings of JSON need no longer search."""

import json
import random

import pytest

from jsg.constrained.build import ambiguity
from jsg.constrained.compiler import compile_tables
from jsg.types import GrammarSpec


class Asked(list):
    """What each question about a grammar's loops was answered with: (proved, loops that the long search finds)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        super().__init__()
        monkeypatch.setattr("jsg.constrained.build.builder.several_counts", self.ask)

    def ask(self, parts, firsts, repeats, known):
        counting = [number for number in repeats if ambiguity._counts(parts, number)]
        proved = ambiguity.have_one_count(parts, counting, ambiguity._MOST_TOGETHER, known)
        found = ambiguity._Search(ambiguity._Levels(parts, firsts)).run() & set(counting)
        self.append((proved, found))
        return set()  # so that a grammar is not built again with longer parts


@pytest.fixture
def asked(monkeypatch):
    return Asked(monkeypatch)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number"},
        {"maxLength": 90, "minLength": 1},
        {"type": "string", "pattern": "^[a-z]{1,90}-[a-z]{1,90}$"},
        {"properties": {"a": {"type": "integer"}, "aa": {"maxLength": 90}, "ab": {"minimum": 0}}},
    ],
)
@pytest.mark.parametrize("whitespace", ["flexible", "compact"])
def test_what_json_counts_is_proved(schema, whitespace, asked):
    compile_tables(GrammarSpec("json_schema", json.dumps(schema), whitespace, "free", "open"))
    assert asked == [(True, set())]


TWO_COUNTS = "(a|aa){1,90} a{1,90}a{1,90} (ab?){70}b{70} (a{1,90}b?)* a*(ab?){1,90} ((a|b){1,90}c?){1,90}".split()
"""Patterns with texts that can be read with several counts of one repeat."""


@pytest.mark.parametrize("pattern", TWO_COUNTS)
def test_what_may_have_two_counts_is_not_proved(pattern, asked):
    compile_tables(GrammarSpec("regex", pattern))
    proved, found = asked[0]
    assert found and not proved


def test_a_rule_with_many_loops_is_searched(asked):
    many = "|".join(f"[a-{chr(ord('b') + number % 20)}]{{1,{90 + number}}}{number:02}" for number in range(40))
    compile_tables(GrammarSpec("regex", many))
    proved, found = asked[0]
    assert len(found) == 40 and not proved


def test_what_is_proved_of_random_patterns_is_true(asked):
    chance = random.Random(8)

    def part():
        item = chance.choice(["a", "b", "ab", "[ab]", "a?b", "(a|ab)", "(a|ba)", "ab*a"])
        return f"({item}){chance.choice(['{1,90}', '{40,90}', '*', ''])}"

    for _ in range(150):
        separators = [chance.choice(["", "", "a", "b", "c", "ab"]) for _ in range(3)]
        pattern = "".join(part() + separator for separator in separators)
        compile_tables(GrammarSpec("regex", f"({pattern})*{part()}" if chance.random() < 0.3 else pattern))
    proved = [found for is_proved, found in asked if is_proved]
    assert len(proved) > 20 and not any(proved)
    assert sum(bool(found) for _, found in asked) > 20
