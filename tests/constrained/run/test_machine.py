"""The automaton accepts exactly the texts of its grammar."""

import itertools
import os
import random
import subprocess
import sys
import threading

import pytest

from jsg.constrained import ir
from jsg.constrained.build.builder import build
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.run.machine import Machine
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError
from tests.constrained.grammars import ALPHABET, GrammarMaker
from tests.constrained.naive import NaiveGrammar, all_texts

MANY_WAYS = Limits(heads=120, stack=60)
FORCED = 4
"""Bytes of a forced run that are looked at."""


def machine_of(expr: ir.Expr, limits: Limits = LIMITS, **rules: ir.Expr) -> Machine:
    return Machine(build(ir.Grammar("root", {"root": expr} | rules), limits), limits)


def accepts(machine: Machine, text: bytes) -> bool:
    config = machine.advance(machine.start(), text)
    return config is not None and machine.is_accepting(config)


def compare(seed: int, num_walks: int = 3, longest: int = 12) -> bool:
    """Walks through the texts of a random grammar as the naive reading does; False: none, or the grammar is refused."""
    grammar = GrammarMaker(seed).grammar()
    naive = NaiveGrammar(grammar)
    if not naive.is_alive(grammar.rules[grammar.start]):
        with pytest.raises(GrammarError, match="matches no text"):
            build(grammar)
        return False
    try:
        tables = build(grammar)
    except GrammarError as error:
        if "read in several ways" not in str(error):
            raise
        return False
    machine, choose = Machine(StaticTables.from_bytes(tables.to_bytes()), MANY_WAYS), random.Random(seed)
    for _ in range(num_walks):
        text, config = b"", machine.start()
        for _ in range(longest):
            allowed = machine.allowed_bytes(config)
            assert allowed == naive.next_bytes(text, ALPHABET), (seed, text)
            assert machine.is_accepting(config) == naive.matches(text), (seed, text)
            assert machine.can_continue(config) == bool(allowed)
            assert allowed or machine.is_accepting(config), "a dead end"
            assert machine.forced_run(config, FORCED) == naive.forced_run(text, ALPHABET, FORCED), (seed, text)
            if not allowed:
                break
            byte = bytes([choose.choice(sorted(allowed))])
            text, config = text + byte, machine.advance(config, byte)
            assert config == machine.advance(machine.start(), text), "it depends on how the text is cut"
    return True


def test_random_grammars_are_read_as_they_are_written():
    assert sum(compare(seed) for seed in range(50)) > 30


@pytest.mark.slow
@pytest.mark.parametrize(("end", "least"), [(700, 395), pytest.param(2500, 1500, marks=pytest.mark.long)])
def test_many_random_grammars_are_read_as_they_are_written(end: int, least: int):
    """All of them are long, and a quarter is not."""
    assert sum(compare(seed) for seed in range(50, end)) > least


@pytest.mark.parametrize(
    "expr",
    [
        ir.Repeat(ir.alt(ir.Literal(b"a"), ir.EMPTY), 2, 4, ir.Literal(b"c")),
        ir.Repeat(ir.Literal(b"a"), 2, 3, ir.alt(ir.Literal(b"c"), ir.EMPTY)),
        ir.Repeat(ir.alt(ir.Literal(b"a"), ir.EMPTY), 3, None, ir.alt(ir.Literal(b"b"), ir.EMPTY)),
        ir.Repeat(ir.Literal(b"a"), 0, 3, ir.NEVER),
        ir.Repeat(ir.EMPTY, 2, 3, ir.Literal(b"b")),
        ir.Seq((ir.Repeat(ir.Literal(b"a"), 0, 2), ir.Repeat(ir.Literal(b"a"), 1, 2), ir.Literal(b"b"))),
        ir.Repeat(ir.Words((b"a", b"ab", b"b")), 2, 3),
        ir.Automaton((((ir.Literal(b"a"), 1),), ((ir.Literal(b"b"), 0), (ir.Literal(b"c"), 2)), ()), frozenset({0})),
    ],
)
def test_every_short_text(expr):
    grammar = ir.Grammar("root", {"root": expr})
    machine, naive = Machine(build(grammar)), NaiveGrammar(grammar)
    for text in all_texts(ALPHABET, 6):
        assert accepts(machine, text) == naive.matches(text), text
        assert (machine.advance(machine.start(), text) is not None) == naive.is_viable(text), text


@pytest.mark.parametrize("item", [ir.Literal(b"ab"), ir.Call("pair")])
@pytest.mark.parametrize(("low", "high"), [(0, 500), (500, 500), (499, 501), (500, None)])
@pytest.mark.parametrize("separator", [ir.EMPTY, ir.Literal(b","), ir.alt(ir.Literal(b","), ir.EMPTY)])
def test_counts_at_their_limits(item, low, high, separator):
    machine = machine_of(ir.seq(ir.Repeat(item, low, high, separator), ir.Literal(b".")), pair=ir.Literal(b"ab"))
    joint = b"," if separator != ir.EMPTY else b""
    for count in (0, 1, 498, 499, 500, 501, 502, 700):
        text = joint.join([b"ab"] * count) + b"."
        assert accepts(machine, text) == (low <= count and (high is None or count <= high)), count


def test_counts_inside_counts():
    machine = machine_of(ir.Repeat(ir.Repeat(ir.Literal(b"x"), 300, 300), 300, 300))
    config = machine.advance(machine.start(), b"x" * 89_999)
    assert not machine.is_accepting(config) and machine.forced_run(config, 10) == b"x"
    config = machine.advance(config, b"x")
    assert machine.is_accepting(config) and not machine.can_continue(config)


def members(low: int, high: int | None) -> ir.Bag:
    def member(name: str) -> ir.Expr:
        return ir.Literal(f"{name}=1".encode())

    items = (
        ir.BagItem(member("a"), is_once=True, is_required=True),
        ir.BagItem(member("b"), is_once=True, is_required=True),
        ir.BagItem(member("c"), is_once=True),
        ir.BagItem(member("x")),
    )
    return ir.Bag(items, ir.Literal(b","), low, high)


@pytest.mark.parametrize(("low", "high"), [(0, None), (0, 2), (0, 3), (4, 4), (3, None), (2, 5)])
def test_bag_of_members(low, high):
    machine = machine_of(members(low, high))
    for length in range(6):
        for names in itertools.product("abcx", repeat=length):
            is_valid = {"a", "b"} <= set(names) and all(names.count(name) <= 1 for name in "abc")
            is_valid = is_valid and length >= low and (high is None or length <= high)
            text = ",".join(f"{name}=1" for name in names).encode()
            assert accepts(machine, text) == is_valid, names


def test_bag_leaves_room_for_what_is_required():
    machine = machine_of(members(0, 3))
    config = machine.advance(machine.start(), b"x=1,")
    assert machine.allowed_bytes(config) == set(b"ab")
    config = machine.advance(config, b"b=1")
    assert machine.forced_run(config, 100) == b",a=1"


def test_bag_with_the_most_items_that_are_told_apart():
    names = [bytes([65 + i // 26, 97 + i % 26]) for i in range(ir.MAX_ONCE)]
    items = tuple(ir.BagItem(ir.Literal(name), is_once=True, is_required=i % 2 > 0) for i, name in enumerate(names))
    machine = machine_of(ir.Bag(items, ir.Literal(b",")))
    random.Random(1).shuffle(names)
    assert accepts(machine, b",".join(names))
    assert machine.advance(machine.start(), b",".join([*names[:63], names[0]])) is None
    assert not accepts(machine, b",".join(names[:32]))


def test_recursion_as_deep_as_the_stack_allows():
    limits = Limits(stack=100)
    tree = ir.alt(ir.seq(ir.Literal(b"("), ir.Call("tree"), ir.Literal(b")")), ir.Literal(b"x"))
    machine = machine_of(ir.Call("tree"), limits, tree=tree)
    deepest = max(n for n in range(200) if machine.advance(machine.start(), b"(" * n) is not None)
    assert deepest == 101  # the first needs no frame: nothing is left to do after it
    assert accepts(machine, b"(" * 100 + b"x" + b")" * 100)
    assert not accepts(machine, b"(" * 100 + b"x" + b")" * 99)


def test_a_call_in_tail_position_needs_no_stack():
    machine = machine_of(ir.Call("list"), list=ir.seq(ir.Literal(b"a"), ir.optional(ir.Call("list"))))
    assert accepts(machine, b"a" * 100_000)
    assert machine.num_frames == 0


def test_rules_that_are_begun_alike_share_their_stack():
    name = ir.seq(ir.Literal(b"n"), ir.Repeat(ir.ByteSet(((97, 122),)), 0, None))
    options = [ir.seq(ir.Call("name"), ir.Literal(bytes([49 + i]))) for i in range(9)]
    machine = machine_of(ir.alt(*options), name=name)
    config = machine.advance(machine.start(), b"nabc")
    assert len(config) == 1
    assert machine.allowed_bytes(config) == set(range(97, 123)) | set(b"123456789")


@pytest.mark.parametrize("start", range(12))
def test_a_dozen_alternatives_that_begin_alike_are_all_followed(start: int):
    names = [f"{i:02}" for i in range(12)]
    rules = {}
    for i, name in enumerate(names):
        first = ir.BagItem(ir.literal(f"all={name}"), is_once=True, is_required=True)
        rules[name] = ir.seq(
            ir.Literal(b"{"),
            ir.Bag((ir.BagItem(ir.literal("all=1"), is_once=True), first), ir.Literal(b","), 1, 2 + i % 2),
            ir.Literal(b"}"),
        )
    machine = machine_of(ir.alt(*map(ir.Call, names)), **rules)
    assert accepts(machine, f"{{all=1,all={names[start]}}}".encode())
    assert accepts(machine, f"{{all={names[start]},all=1}}".encode())
    assert not accepts(machine, f"{{all={names[start]},all={names[start]}}}".encode())


def test_more_ways_than_are_followed_are_an_error_and_none_is_dropped():
    word, again = ir.Literal(b"ab"), ir.Call("again")
    machine = machine_of(again, Limits(heads=4), again=ir.alt(ir.seq(word, again), ir.seq(word, again, word), word))
    assert accepts(machine, b"ab" * 3)
    with pytest.raises(GrammarError, match="may be read in at most 4 ways at once"):
        machine.advance(machine.start(), b"ab" * 500)


@pytest.mark.parametrize(
    ("expr", "unit"),
    [
        (
            ir.seq(
                ir.Repeat(ir.ByteSet(((97, 98),)), 0, None),
                ir.Literal(b"a"),
                ir.Repeat(ir.ByteSet(((97, 98),)), 20, 20),
            ),
            b"ab",
        ),
        (
            ir.seq(
                ir.Repeat(ir.ByteSet(((32, 126),)), 0, None),
                ir.Literal(b"a"),
                ir.Repeat(ir.ByteSet(((32, 126),)), 14, 14),
            ),
            b"xa",
        ),
    ],
)
def test_exponential_automata_are_made_only_as_far_as_they_are_read(expr, unit):
    machine, choose = machine_of(expr), random.Random(3)
    length = 21 if unit == b"ab" else 15
    for _ in range(20):
        text = bytes(choose.choices(unit, k=200))
        assert accepts(machine, text) == (text[-length] == ord("a"))
    assert machine.num_states < 5000


def test_states_have_a_limit():
    limits = Limits(states=50)
    expr = ir.seq(
        ir.Repeat(ir.ByteSet(((97, 98),)), 0, None), ir.Literal(b"a"), ir.Repeat(ir.ByteSet(((97, 98),)), 20, 20)
    )
    machine = machine_of(expr, limits)
    with pytest.raises(GrammarError, match="more than 50 states"):
        machine.advance(machine.start(), bytes(random.Random(1).choices(b"ab", k=500)))


def test_tables_that_grow_change_no_answer():
    words = [bytes(random.Random(seed).choices(b"abcdefgh", k=12)) for seed in range(400)]
    machine = machine_of(ir.Repeat(ir.Call("word"), 1, 90, ir.Literal(b" ")), word=ir.Words(tuple(sorted(set(words)))))
    text = b" ".join(words[:80])
    assert accepts(machine, text)
    assert machine.num_states > 256 and machine.num_frames > 128
    assert machine.advance(machine.start(), text + b"!") is None


def test_forced_bytes_stop_where_there_is_a_choice_or_an_end():
    machine = machine_of(ir.seq(ir.Literal(b"abc"), ir.optional(ir.Literal(b"def")), ir.optional(ir.Literal(b"x"))))
    assert machine.forced_run(machine.start(), 10) == b"abc"
    assert machine.forced_run(machine.start(), 2) == b"ab"
    config = machine.advance(machine.start(), b"abcd")
    assert machine.forced_run(config, 10) == b"ef"


def test_forced_bytes_are_whole_characters():
    pair = ir.alt(ir.literal("äö"), ir.literal("äü"))  # ö and ü begin with the same byte
    machine = machine_of(ir.seq(ir.literal("x"), pair))
    assert machine.forced_run(machine.start(), 100) == "xä".encode()
    assert machine.forced_run(machine.start(), 2) == b"x"
    inside = machine.advance(machine.start(), "xä".encode()[:-1])
    assert machine.forced_run(inside, 100) == "ä".encode()[1:]
    assert machine.forced_run(machine.advance(machine.start(), "xäö".encode()[:-1]), 100) == b""


def test_forgetting_frames_keeps_what_is_live():
    tree = ir.alt(ir.seq(ir.Literal(b"("), ir.Call("tree"), ir.ByteSet(((41, 41), (93, 93)))), ir.Literal(b"x"))
    machine = machine_of(ir.seq(ir.Literal(b"<"), ir.Call("tree"), ir.Literal(b">")), tree=tree)
    configs = [machine.advance(machine.start(), b"<" + b"(" * depth) for depth in range(1, 50)]
    num_states = machine.num_states
    start = machine.start()
    renamed = machine.compact([configs[5], configs[20], start])
    assert machine.num_frames == 21 and machine.num_states < num_states
    assert renamed[start] == machine.start()
    for depth, old in ((6, configs[5]), (21, configs[20])):
        after = machine.advance(renamed[old], b"x" + b")" * depth + b">")
        assert machine.is_accepting(after)
        assert after == machine.advance(machine.start(), b"<" + b"(" * depth + b"x" + b")" * depth + b">")


def test_threads_share_a_machine():
    machine = machine_of(members(0, 5))
    texts = [",".join(f"{name}=1" for name in names).encode() for names in itertools.product("abcx", repeat=4)]
    results: list[list[bool]] = [[] for _ in range(4)]

    def read(i: int) -> None:
        results[i] = [accepts(machine, text) for text in texts]

    threads = [threading.Thread(target=read, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0].count(True) == 36
    assert all(result == results[0] for result in results)


def test_kernels_give_the_same_without_numba():
    program = (
        "import sys; sys.modules['numba'] = None\n"
        "from tests.constrained.run.test_machine import compare\n"
        "from tests.constrained.run.test_walk import check_walk\n"
        "assert sum(compare(seed, num_walks=1, longest=6) for seed in range(12)) > 5\n"
        "check_walk(3, num_texts=2)\n"
    )
    environment = os.environ | {"PYTHONWARNINGS": "error"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment, timeout=120)
