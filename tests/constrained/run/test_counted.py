"""Counted repeats are exact, however a text may be cut into their items.

The reference is `re`, unless it would try out every way to cut a text; then it is the obvious reader (`naive.py`).
"""

import itertools
import json
import random
import re

import pytest

from jsg.constrained import ir
from jsg.constrained.build import ambiguity
from jsg.constrained.compiler import compile_tables
from jsg.constrained.regex.parse import regex_grammar
from jsg.constrained.run.machine import Machine
from jsg.errors import GrammarError
from jsg.types import GrammarKind, GrammarSpec
from tests.constrained.naive import NaiveGrammar, Reading
from tests.constrained.texts import accepts, can_begin


class _Remembering(Reading):
    """Reads each part at each place once."""

    def __init__(self, grammar: NaiveGrammar, text: bytes):
        super().__init__(grammar, text)
        self.found: dict[tuple[int, int], set[int]] = {}

    def ends(self, expr: ir.Expr, at: int) -> set[int]:
        key = id(expr), at
        if key not in self.found:
            self.found[key] = super().ends(expr, at)
        return self.found[key]


def _expected(pattern: str, texts: list[str]) -> dict[str, bool]:
    """For each text, whether the pattern matches all of it."""
    grammar = NaiveGrammar(regex_grammar(pattern))
    data = {text: text.encode() for text in texts}
    root = grammar.rules[grammar.start]
    return {text: len(data[text]) in _Remembering(grammar, data[text]).ends(root, 0) for text in texts}


def _machine(kind: GrammarKind, text: str) -> Machine:
    return Machine(compile_tables(GrammarSpec(kind, text)))


def _num_loops(kind: GrammarKind, text: str) -> int:
    return len(compile_tables(GrammarSpec(kind, text)).loops)


def _texts(alphabet: str, lengths: range, per_length: int) -> list[str]:
    """Random texts, with few and with many different letters in a row."""
    chance = random.Random(alphabet)
    return [
        "".join(chance.choices(alphabet, [chance.random() ** 3 + 1e-3 for _ in alphabet], k=length))
        for length in lengths
        for _ in range(per_length)
    ]


AMBIGUOUS = {
    r".*a.{40}": _texts("ab", range(36, 60, 2), 2),
    r"(?:a|b)*a(?:a|b){90,120}": _texts("ab", range(85, 140, 5), 1),
    r".*a.{70}b.{3}": _texts("ab", range(70, 90, 2), 2),
    r"(?:[a-z]+ ?){40,100}": [*_texts("ab ", range(36, 110, 9), 1), *("a" * n for n in (39, 40, 150))],
    r"(?:[a-z]{1,40}[a-m ]{1,40}){1,40}": [
        *_texts("ax ", range(1, 300, 52), 2),
        "x" * 40,
        "x" * 41,
        "xa" * 40,
        "xa" * 41,
    ],
    r"(?:a|ab|ba){50,70}": [*_texts("ab", range(45, 145, 8), 1), *("a" * n for n in (49, 50, 70, 71))],
    r"(?:aa|aaa){40,50}": ["a" * n for n in (79, 80, 81, 110, 149, 150, 151)],
    r"(?:a{2,3},?){30,33}": [*("aa," * n for n in range(28, 36)), *("a" * n for n in (59, 60, 61, 98, 99, 100))],
    r"(?:(?:ab?){1,30}b?){3,9}c": [f"{'ab' * n}{b}c" for n in (2, 3, 30, 270, 271) for b in ("", "b", "bb")],
    r"(?:[ab]{1,70}[bc]{1,70}){2}": _texts("abc", range(1, 290, 20), 2),
    r"a{0,100}a{0,100}b": [f"{'a' * n}b" for n in (0, 1, 100, 101, 199, 200, 201)],
    r"(?:é|éa|a){70,90}": [*("é" * n for n in (69, 70, 90, 91)), *_texts("éa", range(60, 140, 5), 1)],
}


AMBIGUOUS[".*" * 30 + "a.{60}"] = _texts("ab", range(58, 76, 8), 2)  # so much so that it takes too long to see it


@pytest.mark.parametrize("pattern", AMBIGUOUS)
def test_every_reading_of_a_repeat_is_followed(pattern: str) -> None:
    machine = _machine("regex", pattern)
    expected = _expected(pattern, AMBIGUOUS[pattern])
    assert {text: accepts(machine, text) for text in expected} == expected
    assert {True, False} == set(expected.values())


@pytest.mark.parametrize("pattern", ["a.{100}$", "[ab]{3}$|^.{0,90}c.{80}", "a[a-z]{70}"])
def test_every_reading_of_a_pattern_of_a_schema_is_followed(pattern: str) -> None:
    machine = _machine("json_schema", json.dumps({"type": "string", "pattern": pattern}))
    texts = [text[:n] for n, text in zip(range(60, 240, 2), itertools.cycle(_texts("abc", range(240, 244), 3)))]
    expected = {text: re.search(pattern, text) is not None for text in texts}
    assert {text: accepts(machine, f'"{text}"') for text in expected} == expected
    assert {True, False} == set(expected.values())


def test_every_reading_of_a_repeat_in_a_context_free_grammar_is_followed() -> None:
    machine = _machine("ebnf", 'root ::= "(" (word | root)* ")"\nword ::= (([a-z] | "_")+ "-"?){1,70} "."')
    for length in (1, 69, 70, 71):
        assert accepts(machine, f"({'a-' * length}.)") == (length <= 70)
        assert accepts(machine, f"(a.({'ab' * length}.))")


UNAMBIGUOUS = {
    r'"[a-z]{1,100000}"': ['"a"', '"' + "a" * 100_000 + '"'],
    r"[a-z]{0,100000}[0-9]*": ["a" * 500, "a" * 70 + "77"],
    r"(?:[a-z]+ ){2,90000}": ["a b " * 90],
    r"(?:[a-z]{1,100},){1,10000}\.": ["a,bb," * 80 + "."],
    r"(?:a[bc]|ad){100,200}": ["abad" * 50],
    r"[a-z]{1,100000}(?:[a-m]|x)*": ["a" * 300],
    r"(?:é|è|[a-z]){2,70000}": ["éèa" * 50],
    r"(?:(?:x{300}){300}){2}": ["x" * 180_000],
    r"(?:[0-9a-f]{2}(?:[0-9a-f]{2}:){80}){70}[0-9a-f]?": [("00" + "11:" * 80) * 70],
}


@pytest.mark.parametrize("pattern", UNAMBIGUOUS)
def test_what_is_read_in_one_way_stays_a_count(pattern: str) -> None:
    tables = compile_tables(GrammarSpec("regex", pattern))
    assert len(tables.loops) > 0 and tables.num_positions < 60
    machine = Machine(tables)
    for text in UNAMBIGUOUS[pattern]:
        assert accepts(machine, text) and can_begin(machine, text)


def test_characters_that_begin_alike_are_no_two_counts() -> None:
    pattern = r"(?:\w+\s*=\s*\w+\s*;\s*){1,50000}"  # ⁿ and wide spaces begin alike
    tables = compile_tables(GrammarSpec("regex", pattern))
    assert len(tables.loops) == 1
    machine = Machine(tables)
    assert accepts(machine, "aé_1\u2003=\u2002ⁿ;\u2029b=2;" * 100)


@pytest.mark.parametrize(
    "pattern", [r".*a.{20000}", r"(?:[a-z]+ ?){2,100000}", r"(?:(?:[a-z]+ ?){2,90}[a-m]?){2,90}", r"(?:a|ab|ba){5000}"]
)
def test_counts_that_cannot_be_followed_exactly_are_refused_by_name(pattern: str) -> None:
    with pytest.raises(GrammarError, match=r"repeat of .* read in several ways .* at most \d+ places"):
        compile_tables(GrammarSpec("regex", pattern))


def test_many_counts_beside_each_other_are_written_out() -> None:
    options = "|".join(f"[a-z]{{1,70}}{number}" for number in range(60))
    machine = _machine("regex", options)
    for number in (0, 31, 32, 59):
        assert accepts(machine, f"{'a' * 70}{number}") and not accepts(machine, f"{'a' * 71}{number}")


def test_random_repeats_are_those_of_re():
    for seed in range(20):
        _check_random_repeat(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20, 150))
def test_many_random_repeats_are_those_of_re(seed: int) -> None:
    _check_random_repeat(seed)


def _check_random_repeat(seed: int) -> None:
    chance = random.Random(seed)

    def part(depth: int) -> str:
        if depth == 0:
            return chance.choice(["a", "b", "[ab]", "ab?", "b?a"])
        item = "".join(part(depth - 1) for _ in range(chance.randint(1, 2)))
        low = chance.choice([0, 1, 2, 5, 30])
        count = chance.choice(["*", "?", f"{{{low},{low + chance.choice([1, 30, 80])}}}", f"{{{low}}}", f"{{{low},}}"])
        return f"(?:{item}){count}" if chance.random() < 0.8 else f"(?:{item}|{part(depth - 1)})"

    pattern = part(2) + part(1)
    try:
        machine = _machine("regex", pattern)
    except GrammarError as error:
        if "read in several ways" not in str(error):
            raise
        return
    for text, expected in _expected(pattern, _texts("ab", range(0, 120, 14), 2)).items():
        assert accepts(machine, text) == expected, (pattern, text)


@pytest.mark.parametrize("num_calls", [100, 400])
def test_what_is_looked_at_does_not_grow_with_the_callers_of_a_rule(num_calls: int, monkeypatch: pytest.MonkeyPatch):
    """Where a rule that is called from everywhere ends, each caller is a way on, and each of them ends one too."""
    searches = []
    ended = ambiguity._Search._ended

    def counted(self, *arguments):
        starts = list(ended(self, *arguments))
        searches.append(len(starts))
        return starts

    monkeypatch.setattr(ambiguity._Search, "_ended", counted)
    letters = [chr(ord("A") + i // 20) + chr(ord("a") + i % 20) for i in range(num_calls)]
    calls = " | ".join(f'"{each}" stmt' for each in letters)
    text = f'root ::= stmt ";" [a-z]{{100}}\nstmt ::= "(" stmt ")" | {calls} | [0-9]{{100}} "x"? "x"?'
    compile_tables(GrammarSpec("ebnf", text))
    assert sum(searches) < ambiguity._FUEL
