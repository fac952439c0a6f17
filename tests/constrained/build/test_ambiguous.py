"""Grammars with many ways to read a text, against the CYK algorithm, with as many stacks as a server follows."""

import itertools
import json
import random

import pytest

from jsg.constrained.build import ambiguity
from jsg.constrained.compiler import compile_tables
from jsg.constrained.ebnf.parser import ebnf_grammar
from jsg.constrained.limits import LIMITS
from jsg.constrained.run.machine import Machine
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained.texts import accepts, machine_of, most_heads

type Rules = dict[str, list[str]]
"""For each name its options: a letter, or two names. Chomsky's normal form."""

LETTERS = "ab"
LONGEST = 6


def _random_rules(chance: random.Random) -> Rules:
    names = ["root", "x", "y", "z"][: chance.randint(2, 4)]
    return {
        name: [
            *(f"{chance.choice(names)} {chance.choice(names)}" for _ in range(chance.randint(1, 2))),
            *chance.sample(LETTERS, chance.randint(1, 2)),
        ]
        for name in names
    }


def _ebnf(rules: Rules) -> str:
    return "\n".join(
        f"{name} ::= {' | '.join(option if ' ' in option else repr(option) for option in options)}"
        for name, options in rules.items()
    )


def _words() -> list[str]:
    return ["".join(letters) for n in range(1, LONGEST + 1) for letters in itertools.product(LETTERS, repeat=n)]


def _language(rules: Rules) -> set[str]:
    """The words that `root` derives, by Cocke, Younger and Kasami: what derives a word, from what derives its parts."""
    by: dict[str, set[str]] = {}
    for word in _words():
        by[word] = {name for name, options in rules.items() if word in options}
        for cut in range(1, len(word)):
            left, right = by[word[:cut]], by[word[cut:]]
            pairs = {f"{one} {other}" for one in left for other in right}
            by[word] |= {name for name, options in rules.items() if not pairs.isdisjoint(options)}
    return {word for word, names in by.items() if "root" in names}


def test_random_grammars_against_cyk() -> None:
    chance, ambiguous, read = random.Random(5), 0, 0
    for _ in range(70):
        rules = _random_rules(chance)
        machine = machine_of(ebnf_grammar(_ebnf(rules)))
        expected = _language(rules)
        for word in _words():
            try:
                assert accepts(machine, word) == (word in expected), (rules, word)
                ambiguous += most_heads(machine, word) > 1 if word in expected else 0
                read += 1
            except GrammarError:  # it has too many ways to read the word
                pass
    assert ambiguous > 1000 and read > 0.8 * 70 * len(_words()), (ambiguous, read)


PALINDROMES = "root ::= '' | 'a' | 'b' | 'a' root 'a' | 'b' root 'b'"
COPIES = "root ::= x | y\nx ::= 'a' x 'b' | 'ab'\ny ::= 'a' y 'bb' | 'abb'"
TWO_COUNTS = "root ::= x c | a y\nx ::= 'a' x 'b' | ''\nc ::= 'c' c | ''\na ::= 'a' a | ''\ny ::= 'b' y 'c' | ''"


def _machine(text: str) -> Machine:
    return machine_of(ebnf_grammar(text))


def test_words_that_read_the_same_backwards() -> None:
    machine = _machine(PALINDROMES)
    for word in _words():
        assert accepts(machine, word) == (word == word[::-1]), word
    assert max(most_heads(machine, word) for word in _words() if word == word[::-1]) > 2


def test_more_ways_to_read_than_are_followed_are_an_error() -> None:
    machine, word = _machine(PALINDROMES), "a" * LIMITS.heads
    with pytest.raises(GrammarError, match=f"at most {LIMITS.heads} ways at once"):
        accepts(machine, word * 3)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_two_counts_at_once(count: int) -> None:
    machine = _machine(COPIES)
    for bs in range(2 * count + 2):
        assert accepts(machine, "a" * count + "b" * bs) == (bs in (count, 2 * count))
    assert most_heads(machine, "a" * count + "b" * count) == min(count, 2)


def test_a_language_that_no_grammar_reads_in_one_way() -> None:
    machine = _machine(TWO_COUNTS)
    for a, b, c in itertools.product(range(6), repeat=3):
        assert accepts(machine, "a" * a + "b" * b + "c" * c) == (a == b or b == c), (a, b, c)
    assert not accepts(machine, "ba") and not accepts(machine, "acb")


def test_names_that_begin_alike_are_compared_as_one(monkeypatch) -> None:
    """The search takes twice as much for twice as many names. By pairs it took three times as much."""
    searches: list[ambiguity._Search] = []
    run = ambiguity._Search.run
    monkeypatch.setattr(ambiguity._Search, "run", lambda search: searches.append(search) or run(search))
    monkeypatch.setattr(ambiguity, "have_one_count", lambda *_: False)

    def spent(num_names: int) -> int:
        schema = {"properties": {f"name{number:03}": {"maxLength": 90} for number in range(num_names)}}
        searches.clear()
        compile_tables(GrammarSpec("json_schema", json.dumps(schema), "flexible", "free", "open"))
        return sum(ambiguity._FUEL - search._fuel for search in searches)

    assert 0 < spent(30) < 2 * spent(15)
