"""Many parts in a row that may be left out: tables as long as the grammar, read as a naive reader reads it."""

import random
import string
from collections.abc import Callable

import pytest

from jsg.constrained import ir
from jsg.constrained.build import builder, finish
from jsg.constrained.build.builder import build
from jsg.constrained.ebnf.parser import ebnf_grammar
from jsg.constrained.regex.parse import regex_grammar
from tests.constrained.grammars import ALPHABET
from tests.constrained.naive import NaiveGrammar
from tests.constrained.run.test_machine import compare
from tests.constrained.texts import accepts, can_begin, machine_of
from tests.constrained.work import work

DIGITS = "[0-9]{1,2}"


def regex(pattern: Callable[[int], str]) -> Callable[[int], ir.Grammar]:
    return lambda number: regex_grammar("".join(pattern(i) for i in range(number)))


def rules(row: str, rule: str) -> Callable[[int], ir.Grammar]:
    """Rules in a row; the root is such a row, and so is each rule."""

    def grammar(number: int) -> ir.Grammar:
        root = " ".join(row.format(f"r{i}") for i in range(number))
        return ebnf_grammar("\n".join([f"root ::= {root}", *(f"r{i} ::= {rule.format(i)}" for i in range(number))]))

    return grammar


def inside(form: Callable[[ir.Expr], ir.Expr]) -> Callable[[int], ir.Grammar]:
    """Expressions inside of each other, which only a schema nests so deeply."""

    def grammar(number: int) -> ir.Grammar:
        expr: ir.Expr = ir.literal("x")
        for _ in range(number):
            expr = form(expr)
        return ir.Grammar("root", {"root": expr})

    return grammar


def members_of_two_kinds(number: int) -> ir.Grammar:
    """Members in a row, of which each second one begins with a rule."""
    labels = [ir.Call("r") if i % 2 else ir.literal(f"k{i:03}") for i in range(number)]
    edges = [((label, i + 1),) for i, label in enumerate(labels)]
    skips = tuple([(state, state + 1) for state in range(number)])
    row = ir.Automaton((*edges, ()), frozenset({number}), skips)
    return ir.Grammar("root", {"root": row, "r": ir.literal("r")})


IN_A_ROW = {
    "letters": regex(lambda _: "a?"),
    "letters of three kinds": regex(lambda i: "abc"[i % 3] + "?"),
    "stars": regex(lambda i: "ab"[i % 2] + "*"),
    "sets that overlap": regex(lambda i: ("[a-m]?", "[g-z]?", "x*")[i % 3]),
    "words": regex(lambda i: f"(w{i:03})?"),
    "words or numbers": regex(lambda i: f"(w{i:03}|{DIGITS})?"),
    "one in ten must come": regex(lambda i: f"(w{i:03})" + "?" * (i % 10 > 0)),
    "a row that is repeated": lambda n: regex_grammar(f"({''.join(f'(w{i:03})?' for i in range(n))})*!"),
    "a row that is counted": lambda n: ebnf_grammar(
        f"root ::= item{{0,500}}\nitem ::= {' '.join(f'"w{i:03}"?' for i in range(n))} ';'"
    ),
    "a row behind a row": lambda n: regex_grammar(f"({'a?' * n}|{'b?' * n})({'c?' * n}|{'d?' * n})"),
    "rules": rules("{}?", '"w{:03}" [0-9]+'),
    "rules that may be empty": rules("{}", '("w{:03}" [0-9]+)?'),
    "any of many, and then a row": lambda n: regex_grammar(f"({'|'.join(f'w{i:03}' for i in range(n))})*{'a?' * n}"),
    "any of many with an end that may be left out": lambda n: regex_grammar(
        f"({'|'.join(f'w{i:03}({DIGITS})?' for i in range(n))})*"
    ),
    "a row, and then any of many": lambda n: ebnf_grammar(
        f"root ::= {'"a"? ' * n}({' | '.join(f'r{i}' for i in range(n))})\n"
        + "\n".join(f'r{i} ::= "w{i:03}"' for i in range(n))
    ),
    "inside on the right": inside(lambda inner: ir.Alt((ir.Seq((ir.literal("a"), inner)), ir.EMPTY))),
    "inside on the left": inside(lambda inner: ir.Seq((ir.Alt((inner, ir.EMPTY)), ir.optional(ir.literal("b"))))),
    "members of two kinds": members_of_two_kinds,
}


@pytest.mark.parametrize("name", IN_A_ROW)
def test_tables_are_as_long_as_the_grammar(name: str):
    few, many = (build(IN_A_ROW[name](number)) for number in (60, 240))
    assert many.num_positions < 4.2 * few.num_positions and len(many.list_items) < 4.6 * len(few.list_items)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_A_ROW)
def test_the_work_is_as_long_as_the_grammar(name: str):
    few, many = (work(lambda number=number: build(IN_A_ROW[name](number))) for number in (250, 1000))
    assert many < 5 * few


@pytest.mark.parametrize("number", [5, 40])
def test_a_row_of_letters_by_hand(number: int):
    machine = machine_of(regex_grammar("a?" * number + "b?" + "a" * number))
    for before in range(2 * number + 2):
        assert accepts(machine, "a" * before) == (number <= before <= 2 * number)
        assert can_begin(machine, "a" * before + "b") == (before <= number)


PIECES = ("a?", "b?", "c?", "a*", "b*", "(ab)?", "(ba)*", "[ab]?", "(a|bc)?", "a", "(ab?c?)?", "(a?b?)*", "(c|(a?b)?)")


def _pattern(chance: random.Random) -> str:
    row = "".join(chance.choices(PIECES, k=chance.randint(10, 60)))
    form = chance.choice(("{0}", "{0}", "({0})*", "({0}|c)b?", "(a|({0}))({0})?", "({0}){{0,3}}"))
    return form.format(row)


def _read(seed: int, num_texts: int = 30) -> None:
    """Python's `re` would take exponential time for such patterns."""
    chance = random.Random(seed)
    pattern = _pattern(chance)
    grammar = regex_grammar(pattern)
    machine, naive = machine_of(grammar), NaiveGrammar(grammar)
    for _ in range(num_texts):
        text = bytes(chance.choices(ALPHABET, k=chance.randint(0, 10)))
        assert accepts(machine, text) == naive.matches(text), (pattern, text)


def test_random_rows_are_read_as_they_are_written():
    for seed in range(4):
        _read(seed)


@pytest.mark.slow
def test_many_random_rows_are_read_as_they_are_written():
    for seed in range(4, 150):
        _read(seed)


@pytest.mark.parametrize(("last", "num_counted"), [("", 1), (";", 2)])
def test_counts_that_meet_across_a_row_are_found(last: str, num_counted: int):
    row = "".join(f"{letter}?" for letter in string.ascii_uppercase)
    assert len(build(regex_grammar(f"[a-z]{{1,90}}{row}{last}[a-z]{{1,90}}")).loops) == num_counted


def test_random_grammars_are_read_as_they_are_written_where_links_are_everywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "MOST_COPIED", 0)
    monkeypatch.setattr(finish, "MOST_COPIED", 0)
    assert sum(compare(seed) for seed in range(1_000, 1_020)) > 10


@pytest.mark.slow
def test_many_random_grammars_where_links_are_everywhere(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "MOST_COPIED", 0)
    monkeypatch.setattr(finish, "MOST_COPIED", 0)
    assert sum(compare(seed) for seed in range(1_020, 1_400)) > 200
