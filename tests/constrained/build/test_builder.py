"""Grammars become tables, or are refused by name."""

import hashlib

import numpy as np
import pytest

from jsg.constrained import ir
from jsg.constrained.build.builder import build
from jsg.constrained.files import digest_of
from jsg.constrained.jit import use_kernel_cache
from jsg.constrained.limits import Limits
from jsg.constrained.run.machine import Machine
from jsg.constrained.run.vocab import Vocabulary
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError
from tests.constrained.work import work


def grammar_of(expr: ir.Expr, **rules: ir.Expr) -> ir.Grammar:
    return ir.Grammar("root", {"root": expr} | rules)


def then(text: str, *rest: ir.Expr) -> ir.Expr:
    return ir.seq(ir.literal(text), *rest)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (grammar_of(ir.Call("root")), "matches no text"),
        (grammar_of(ir.alt(ir.Call("root"), ir.literal("x"))), "root → root"),
        (grammar_of(ir.alt(then("x"), ir.Call("a")), a=ir.seq(ir.Call("root"), ir.literal("y"))), "root → a → root"),
        (grammar_of(ir.seq(ir.optional(ir.literal("x")), ir.optional(ir.Call("root")))), "root → root"),
        (grammar_of(ir.seq(ir.Call("e"), ir.Call("root")), e=ir.EMPTY), "matches no text"),
        (grammar_of(ir.seq(ir.Call("e"), ir.optional(ir.Call("root"))), e=ir.EMPTY), "root → root"),
        (grammar_of(ir.Repeat(ir.alt(ir.Call("root"), ir.literal("x")), 0, 500)), "root → root"),
        (grammar_of(then("x", ir.Call("nobody"))), "rule 'nobody', which rule 'root' calls, does not exist"),
        (ir.Grammar("start", {}), "rule 'start', which the start calls, does not exist"),
        (grammar_of(ir.NEVER), "matches no text: rule 'root'"),
        (grammar_of(then("x", ir.Call("a")), a=then("(", ir.Call("a"), ir.literal(")"))), "matches no text"),
        (grammar_of(ir.Repeat(ir.literal("a"), 3, 2)), "matches no text"),
        (grammar_of(ir.Bag((ir.BagItem(ir.literal("a"), is_once=True),), ir.EMPTY, 2)), "matches no text"),
        (grammar_of(ir.Bag((ir.BagItem(ir.EMPTY),), ir.literal(","))), "may not be empty"),
        (grammar_of(ir.Automaton((((ir.optional(ir.literal("a")), 0),),), frozenset({0}))), "may not be empty"),
        (grammar_of(ir.Chars(((65, 66),))), "lowered to bytes"),
        (grammar_of(ir.ByteSet(((65, 256),))), "in 0..255"),
        (
            grammar_of(ir.Bag(tuple(ir.BagItem(ir.literal(f"{i:02}"), True) for i in range(65)), ir.EMPTY)),
            "at most 64",
        ),
    ],
)
def test_refusals(grammar, message):
    with pytest.raises(GrammarError, match=message):
        build(grammar)


def test_where_no_text_matches_the_front_end_has_the_word():
    with pytest.raises(GrammarError, match=r"^nothing is both$"):
        build(ir.Grammar("root", {"root": ir.NEVER}, contradiction="nothing is both"))


def test_a_repeat_that_is_refused_is_named_by_its_rule_where_there_are_several():
    letters = ir.ByteSet(((97, 98),))
    window = ir.seq(ir.Repeat(letters, 0, None), ir.Literal(b"a"), ir.Repeat(letters, 9_000, 9_000))
    with pytest.raises(GrammarError, match=r"read in several ways.* \(in rule 'the window'\)$"):
        build(ir.Grammar("root", {"root": ir.Call("the window"), "the window": window}))
    with pytest.raises(GrammarError, match=r"cannot occur inside the item$"):
        build(grammar_of(window))


def test_what_can_never_be_completed_is_left_out():
    dead = then("b", ir.Call("loop"))
    grammar = grammar_of(ir.alt(then("a"), dead, ir.seq(ir.literal("a"), ir.NEVER)), loop=then("(", ir.Call("loop")))
    machine = Machine(build(grammar))
    assert machine.allowed_bytes(machine.start()) == {ord("a")}
    assert not machine.can_continue(machine.advance(machine.start(), b"a"))


@pytest.mark.parametrize("number", [1 << 30, 10**18])
def test_huge_counts_cost_nothing(number):
    tables = build(
        grammar_of(ir.Repeat(ir.Repeat(ir.literal("x"), 0, number, ir.literal(" ")), number, None, ir.literal(",")))
    )
    assert tables.num_positions < 20
    machine = Machine(tables)
    assert machine.advance(machine.start(), b"x x x,,x") is not None


def nested(expr: ir.Expr, depth: int) -> ir.Expr:
    for _ in range(depth):
        expr = ir.Seq((ir.literal("("), expr, ir.literal(")")))
    return expr


def test_deep_nesting_needs_no_stack():
    assert build(grammar_of(nested(ir.literal("x"), 5_000))).num_positions == 10_003


def test_doubling_is_refused_before_it_is_built():
    expr: ir.Expr = ir.Seq(())
    for _ in range(60):
        expr = ir.Seq((expr, expr))
    with pytest.raises(GrammarError, match="at most"):
        build(grammar_of(ir.Seq((expr, ir.literal("x")))))


@pytest.mark.parametrize(
    "expr",
    [
        ir.Literal(b"x" * 3000),
        ir.Words(tuple(sorted(f"{i * 7919 % 100_003:06}".encode() for i in range(900)))),
        ir.Seq(tuple(ir.optional(ir.literal(f"{i:04}")) for i in range(400))),
        ir.Repeat(
            ir.Alt(tuple(ir.seq(ir.literal(f"{i:02}"), ir.optional(ir.literal("x"))) for i in range(95))), 0, None
        ),
    ],
)
def test_positions_and_transitions_have_limits(expr):
    build(grammar_of(expr))
    with pytest.raises(GrammarError, match="at most"):
        build(grammar_of(expr), Limits(positions=1000, transitions=300))


def test_edges_of_automata_have_a_limit_where_positions_are_few():
    labels = [ir.literal(f"{i:02}") for i in range(40)]
    edges = tuple((label, target) for target, label in enumerate(labels))
    grammar = grammar_of(ir.Automaton((edges,) * 40, frozenset({0})))
    assert build(grammar).num_positions < 100
    with pytest.raises(GrammarError, match="at most 1599 edges of automata"):
        build(grammar, Limits(positions=1599))
    build(grammar, Limits(positions=1600))


def chain(number: int) -> ir.Grammar:
    rules = {f"r{i}": ir.alt(ir.Call(f"r{i + 1}"), ir.EMPTY) for i in range(number)}
    return ir.Grammar("r0", rules | {f"r{number}": ir.literal("x")})


def optional_rules(number: int) -> ir.Grammar:
    rules = {f"r{i}": ir.optional(ir.literal("x")) for i in range(number)}
    return ir.Grammar("root", {"root": ir.Alt(tuple(ir.Call(name) for name in rules))} | rules)


@pytest.mark.parametrize("make", [chain, optional_rules])
def test_the_work_is_linear_in_the_number_of_rules(make):
    few, many = (work(lambda grammar=grammar: build(grammar)) for grammar in (make(100), make(1_000)))
    assert many < 12 * few


def optional_names(number: int) -> ir.Grammar:
    """Names in a row, each of which may be left out, as the members of an object are."""
    edges = [((ir.Seq((ir.literal(f'"{i * 7919 % 100_003:05}"'), ir.literal(":1"))), i + 1),) for i in range(number)]
    skips = tuple([(state, state + 1) for state in range(number)])
    return grammar_of(ir.Automaton((*edges, ()), frozenset({number}), skips))


def test_names_that_may_be_left_out_cost_as_much_as_they_are_long():
    few, many = (work(lambda number=number: build(optional_names(number))) for number in (100, 1_000))
    assert many < 13 * few
    few, many = (build(optional_names(number)) for number in (100, 1_000))
    assert many.num_bytes < 13 * few.num_bytes
    machine = Machine(many)
    assert machine.advance(machine.start(), b'"') is not None
    assert machine.advance(machine.start(), b'"00000":1"07919":1"') is not None
    assert machine.advance(machine.start(), b'"07919":1"00000') is None
    # The names that may come are one tree in each place, so a state holds no more positions than there are digits.
    assert max(np.diff(many.list_start)) <= 11


def many_words(number: int) -> tuple[bytes, ...]:
    return tuple(sorted({f"{i * 2_654_435_761 % 2**32:08x}".encode() for i in range(number)}))


def test_the_work_is_linear_in_the_number_of_words():
    grammars = [grammar_of(ir.Words(many_words(number))) for number in (300, 3_000)]
    few, many = (work(lambda grammar=grammar: build(grammar)) for grammar in grammars)
    assert many < 12 * few


def test_many_words():
    words = many_words(5_000)
    machine = Machine(build(grammar_of(ir.Words(words))))
    assert machine.is_accepting(machine.advance(machine.start(), words[777]))
    assert machine.advance(machine.start(), words[777] + b"0") is None


def sample() -> StaticTables:
    bag = ir.Bag(tuple(ir.BagItem(ir.literal(c), True, c == "a") for c in "abc"), ir.literal(","))
    return build(grammar_of(ir.seq(bag, ir.Repeat(ir.Call("word"), 3, 900)), word=ir.Words((b"as", b"is"))))


def test_tables_survive_being_sent():
    tables = sample()
    copy = StaticTables.from_bytes(tables.to_bytes())
    for name, value in tables._asdict().items():
        assert np.array_equal(value, getattr(copy, name)), name
        assert not isinstance(value, np.ndarray) or getattr(copy, name).dtype == value.dtype
    data = tables.to_bytes()
    assert copy.to_bytes() == data and digest_of(data) == hashlib.sha256(data[56:]).hexdigest()
    assert tables.num_bytes == copy.num_bytes > 100


def test_damaged_and_foreign_tables_are_refused():
    data = sample().to_bytes()
    for length in range(24, len(data), 7):
        with pytest.raises(ValueError, match="compile it again"):
            StaticTables.from_bytes(data[:length])
        with pytest.raises(ValueError, match="digest"):
            StaticTables.from_bytes(data[:length] + bytes((data[length] ^ 1,)) + data[length + 1 :])
    with pytest.raises(ValueError, match="digest"):
        StaticTables.from_bytes(data + b"x")
    with pytest.raises(ValueError, match="of version 4, but this is of version 5"):
        StaticTables.from_bytes(data[:16] + b"\5" + data[17:])
    for foreign in (b"", data[:8], b"X" + data[1:], Vocabulary([b"a"], (), (0,)).to_bytes()):
        with pytest.raises(ValueError, match=r"begins with b'jsg\.grammar'"):
            StaticTables.from_bytes(foreign)


@pytest.mark.parametrize(
    ("name", "row", "column", "value"),
    [
        ("positions", 1, 0, 9),
        ("positions", 1, 2, 1000),
        ("positions", 1, 3, -1),
        ("loops", 0, 4, 50),
        ("loops", 0, 6, 10_000),
        ("branches", 0, 0, 10_000),
        ("list_items", 0, None, 1 << 20),
        ("list_start", 1, None, 1 << 20),
        ("classes", 0, None, 255),
    ],
)
def test_tables_that_point_outside_are_refused(name, row, column, value):
    tables = sample()
    array = getattr(tables, name).copy()
    array[row if column is None else (row, column)] = value
    with pytest.raises(ValueError, match="points outside"):
        StaticTables.from_bytes(tables._replace(**{name: array}).to_bytes())


@pytest.mark.parametrize("num_rules", [-5, 0, 1 << 40])
def test_tables_that_give_too_little_or_endless_room_are_refused(num_rules: int):
    """A machine makes room for as many levels as rules, loops and ENDs may be entered at once."""
    with pytest.raises(ValueError, match="points outside"):
        StaticTables.from_bytes(sample()._replace(num_rules=num_rules).to_bytes())


def test_the_kernel_cache_cannot_be_moved_once_kernels_are_loaded(tmp_path):
    Machine(sample())
    assert not use_kernel_cache(tmp_path)
