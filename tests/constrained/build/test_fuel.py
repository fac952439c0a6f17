"""No question about a text takes more steps than its limit, and no text more steps than its tokens pay for."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from jsg.constrained.compiler import compile_tables
from jsg.constrained.grammar import MAX_FORCED_BYTES, MEMO_BYTES, CompiledGrammar
from jsg.constrained.limits import LIMITS, Account, Limits
from jsg.constrained.run.machine import Machine
from jsg.constrained.run.mask_cache import MaskCache
from jsg.constrained.run.slices import ordinary_chars
from jsg.constrained.run.trie import make_trie, sort_tokens
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained.vocabularies import odd_vocabulary, tokenize, word_vocabulary

NO_STEPS = "too many steps"
AMBIGUOUS = 'root ::= s\ns ::= "a" s s | [a-z] s "b" | [a-z] s | "x"'
SUMS = 'root ::= s\ns ::= "a" | "a" s | "a" s "a"'
LETTERS = word_vocabulary(*(bytes([byte]) for byte in range(97, 123)))


def tables_of(kind: str, text: str) -> StaticTables:
    return compile_tables(GrammarSpec(kind, text))  # pyright: ignore[reportArgumentType]


def machine_of(kind: str, text: str, **limits: int) -> Machine:
    return Machine(tables_of(kind, text), dataclasses.replace(LIMITS, **limits), max_token_len=8)


@pytest.mark.parametrize("question", ["advance", "allowed_bytes", "can_continue", "forced_run", "accepts_all", "room"])
def test_every_question_has_fuel(question: str):
    machine = machine_of("ebnf", AMBIGUOUS)
    config = machine.advance(machine.start(), b"aaa")
    assert config is not None
    lengths = itertools.count(10)  # what was asked before is remembered
    forced = machine_of("regex", "a{600}|b")
    behind = forced.advance(forced.start(), b"a")
    assert behind is not None
    free, chars = machine_of("regex", ".*a.{4}"), ordinary_chars(b"")
    inside = free.advance(free.start(), b"xax")
    assert inside is not None
    ask = {
        "advance": lambda: machine.advance(config, b"a" * 50),
        "allowed_bytes": lambda: machine.allowed_bytes(config),
        "can_continue": lambda: machine.can_continue(config),
        "forced_run": lambda: forced.forced_run(behind, MAX_FORCED_BYTES),
        "accepts_all": lambda: free.accepts_all(inside, chars, next(lengths)),
        "room": lambda: free.text_room(inside, chars, 10),
    }[question]
    asked = {"forced_run": forced, "accepts_all": free, "room": free}.get(question, machine)
    ask()  # so that the states are there
    account = Account()
    with asked.paid_by(account):
        ask()
    needed = account.num_steps
    assert needed > 10
    for steps in (0, needed // 2):
        # As many as a text has left, or as one token may take.
        poor = Account(num_steps=LIMITS.text_steps - steps)
        num_frames = asked.num_frames
        if question == "forced_run":  # a hint
            with asked.paid_by(poor):
                assert ask() == b""
            continue
        with pytest.raises(GrammarError, match=NO_STEPS), asked.paid_by(poor):
            ask()
        assert asked.num_frames == num_frames or question == "advance"
    ask()  # what ran out of fuel has left nothing wrong behind


def test_a_text_with_too_many_ways_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    """Room for more states would not help it, and the mask cost up to twice its limit."""
    masker = CompiledGrammar(tables_of("ebnf", SUMS), word_vocabulary(b"a" * 40), Limits(heads=4)).new_masker()
    walks, walk = list[int](), Machine.walk
    monkeypatch.setattr(Machine, "walk", lambda *args: walks.append(1) or walk(*args))
    with pytest.raises(GrammarError, match="in at most 4 ways"):
        masker.mask_key()
    assert len(walks) == 1


def test_work_is_paid_for_once():
    machine = machine_of("ebnf", AMBIGUOUS)
    tokens = [bytes(random.Random(1).choices(b"abx", k=6)) for _ in range(50)]
    trie = make_trie(sort_tokens(range(50), tokens))
    first, again = Account(), Account()
    for account in (first, again):
        with machine.paid_by(account):
            machine.walk(machine.start(), trie, np.zeros(2, np.uint32))
            machine.walk(machine.start(), trie, np.zeros(2, np.uint32))
    assert first.num_steps > again.num_steps > 50, "states are made once, and walks cost what they cost"


def test_a_text_pays_with_its_tokens():
    compiled = CompiledGrammar(tables_of("regex", "[a-z]{1,60}"), LETTERS, Limits(text_steps=20_000, token_steps=300))
    masker, num_read = compiled.new_masker(), 0
    with pytest.raises(GrammarError, match="a text 20000 and 300 more for each of its tokens"):  # noqa: PT012 - or soon
        for _ in range(60):
            masker.mask_key()
            assert masker.accept(1 + num_read % 26)
            num_read += 1
    assert num_read > 3
    assert masker.num_steps > 20_000 + 300 * num_read
    richer = CompiledGrammar(tables_of("regex", "[a-z]{1,60}"), LETTERS, Limits(text_steps=20_000, token_steps=5_000))
    masker = richer.new_masker()
    for _ in range(60):
        masker.mask_key()
        assert masker.accept(1)
    assert masker.is_finished()


def test_what_another_text_has_paid_for_costs_nothing():
    compiled = CompiledGrammar(tables_of("regex", "[a-z]{1,60}"), LETTERS)
    costs = []
    for _ in range(2):
        masker = compiled.new_masker()
        for _ in range(20):
            masker.mask_key()
            masker.forced_bytes()
            assert masker.accept(5)
        costs.append(masker.num_steps)
    assert costs[0] > 1000 and costs[1] == 0


def test_tokens_that_are_taken_back_have_paid_only_once():
    limits = Limits(text_steps=20_000, token_steps=3_000)
    masker = CompiledGrammar(tables_of("regex", "[a-z]{1,60}"), LETTERS, limits).new_masker()
    with pytest.raises(GrammarError, match=NO_STEPS):  # noqa: PT012 - at some turn of many
        for turn in range(1_000):
            assert masker.accept(1 + turn % 26)
            masker.grammar.forget()
            masker.mask_key()
            masker.rollback(1)
    other = masker.fork()
    with pytest.raises(GrammarError, match=NO_STEPS):
        other.mask_key()
    assert masker.grammar.start is not None and masker.num_accepted == 1


def test_a_text_without_fuel_leaves_the_others_theirs():
    compiled = CompiledGrammar(
        tables_of("regex", "[a-z]*x[a-z]{12}"), LETTERS, Limits(text_steps=2_000_000, token_steps=0)
    )
    chance = random.Random(3)
    spent = compiled.new_masker()
    with pytest.raises(GrammarError, match=NO_STEPS):  # noqa: PT012
        while True:
            spent.mask_key()
            assert spent.accept(chance.randint(1, 26))
    fresh = compiled.new_masker()
    for token in tokenize(LETTERS, b"abcx" + b"abcdefghijkl"):
        fresh.mask_key()
        assert fresh.accept(token)
    assert fresh.is_complete()


def test_memory_of_states_is_bounded_and_given_back():
    # Each state holds hundreds of positions.
    limits = Limits(machine_bytes=600_000, text_steps=10**12)
    compiled = CompiledGrammar(tables_of("regex", "(a|b)*a" + "(a|b)" * 400), LETTERS, limits)
    chance, held = random.Random(5), []
    with pytest.raises(GrammarError, match="needs more than 600000 bytes"):  # noqa: PT012 - which of them is not the point
        for _ in range(3_000):
            masker = compiled.new_masker()
            held.append(masker)  # what somebody stands on cannot be forgotten
            for token in chance.choices((1, 2), k=40):
                assert masker.accept(token)
                assert compiled.num_bytes < 600_000 + MEMO_BYTES
    held.clear()
    for _ in range(100):  # nobody does any more, so that what was made makes room
        masker = compiled.new_masker()
        for token in chance.choices((1, 2), k=40):
            assert masker.accept(token)


def test_masks_of_deep_stacks_that_are_read_in_several_ways_are_named_in_short():
    text = 'root ::= "<" (a | b) ">"\na ::= "(" a ")" | "x"\nb ::= "((" b "))" "."? | "x"'
    machine = machine_of("ebnf", text)
    config = machine.advance(machine.start(), b"<" + b"(" * 300)
    assert config is not None and len(config) > 1
    key = machine.frames_read(config, 3)
    assert isinstance(key, tuple) and len(key) == 1 + len(config)
    assert key == machine.frames_read(config, 3)
    deeper = machine.advance(config, b"(")
    assert deeper is not None and machine.frames_read(deeper, 3) != key
    shallow = machine.advance(machine.start(), b"<((")
    assert shallow is not None and machine.frames_read(shallow, 1) != key


def test_memory_of_masks_counts_what_names_them():
    tables = tables_of("ebnf", 'root ::= "<" (a | b) ">"\na ::= "(" a ")" | "x"\nb ::= "((" b "))" "."? | "x"')
    vocabulary = odd_vocabulary()
    machine = Machine(tables, max_token_len=vocabulary.max_token_len)
    masks, sizes = MaskCache(machine, vocabulary), []
    for depth in (1, 20):
        before = masks.num_bytes
        config = machine.advance(machine.start(), b"<" + b"(" * depth)
        assert config is not None
        masks.find(config, is_complete=False)
        sizes.append(masks.num_bytes - before)
    assert sizes[1] > sizes[0] + 1_000


def test_forced_bytes_are_handed_from_place_to_place():
    text = "é" * 300 + "(a|b)" + "c" * 5_000
    vocabulary, tables = odd_vocabulary(), tables_of("regex", text)
    tokens = tokenize(vocabulary, text.replace("(a|b)", "a").encode())
    masker = CompiledGrammar(tables, vocabulary).new_masker()
    rest = text.replace("(a|b)", "a").encode()
    for place, token in enumerate(tokens):
        if place % 2_500 == 0 or abs(len(rest) - 5_001) < 4:
            fresh = CompiledGrammar(tables, vocabulary).new_masker()
            assert all(fresh.accept(each) for each in tokens[:place])
            assert masker.forced_bytes() == fresh.forced_bytes()
        forced = masker.forced_bytes()
        assert rest.startswith(forced)
        assert masker.accept(token)
        rest = rest[len(vocabulary.text_of(token)) :]
    assert masker.is_complete()


def test_a_long_constant_costs_a_text_what_it_is_long():
    compiled = CompiledGrammar(tables_of("regex", "a" * 3_000), LETTERS)
    masker = compiled.new_masker()
    masker.forced_bytes()
    once = masker.num_steps
    for _ in range(2_999):
        assert masker.accept(1) and masker.forced_bytes() == b"a" * (3_000 - masker.num_accepted)
    assert masker.num_steps < 5 * once
