"""Masks: a walk over a trie of tokens finds the same tokens as reading each alone, and says which frames it read."""

import random

import numpy as np
import pytest

from jsg.constrained import ir
from jsg.constrained.build.builder import build
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.run.machine import Config, Machine
from jsg.constrained.run.slices import ordinary_chars
from jsg.constrained.run.trie import Trie, make_trie, sort_tokens
from jsg.errors import GrammarError
from tests.constrained.grammars import ALPHABET, GrammarMaker

LONGEST = 9


def random_tokens(choose: random.Random, number: int = 120) -> list[bytes]:
    return [bytes(choose.choices(ALPHABET, k=choose.randint(1, LONGEST))) for _ in range(number)]


def mask_of(machine: Machine, config: Config, trie: Trie, num_tokens: int) -> tuple[np.ndarray, int]:
    mask = np.zeros((num_tokens + 31) // 32, np.uint32)
    depth = machine.walk(config, trie, mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:num_tokens], depth


def check_walk(seed: int, num_texts: int = 12) -> int:
    """Compares masks with reading token by token, and masks that are found by frames with each other."""
    choose = random.Random(seed)
    try:
        machine = Machine(build(GrammarMaker(seed).grammar()), Limits(stack=60), max_token_len=LONGEST)
    except GrammarError:
        return 0
    tokens = random_tokens(choose)
    trie = make_trie(sort_tokens(range(len(tokens)), tokens))
    found: dict[object, np.ndarray] = {}
    num_checked = 0
    for _ in range(num_texts):
        config = machine.start()
        for _ in range(12):
            frames = machine.num_frames
            mask, depth = mask_of(machine, config, trie, len(tokens))
            assert machine.num_frames == frames, "a walk leaves frames behind"
            after = [machine.advance(config, token) for token in tokens]
            assert mask.tolist() == [int(one is not None) for one in after], (seed, config)
            key = (tuple(state for state, _ in config), depth, machine.frames_read(config, depth))
            assert (found.setdefault(key, mask) == mask).all(), (seed, config)
            num_checked += 1
            allowed = [one for one in after if one is not None]
            if not allowed:
                break
            config = choose.choice(allowed)
    return num_checked


def test_masks_of_random_grammars():
    assert sum(check_walk(seed) for seed in range(15)) > 250


@pytest.mark.slow
@pytest.mark.parametrize(("end", "least"), [(215, 2_500), pytest.param(800, 10_000, marks=pytest.mark.long)])
def test_masks_of_many_random_grammars(end: int, least: int):
    """All of them are long, and a quarter is not."""
    assert sum(check_walk(seed) for seed in range(15, end)) > least


def machine_of(expr: ir.Expr, limits: Limits = LIMITS, **rules: ir.Expr) -> Machine:
    return Machine(build(ir.Grammar("root", {"root": expr} | rules), limits), limits, max_token_len=LONGEST)


def test_masks_inside_a_rule_do_not_depend_on_its_callers():
    word = ir.seq(ir.Literal(b"["), ir.Repeat(ir.ByteSet(((97, 99),)), 0, None), ir.Literal(b"]"))
    machine = machine_of(ir.seq(ir.Call("word"), ir.Literal(b"x"), ir.Call("word"), ir.Literal(b"y")), word=word)
    tokens = [b"ab", b"]", b"c]"]
    trie = make_trie(sort_tokens(range(len(tokens)), tokens))
    first, second = machine.advance(machine.start(), b"[a"), machine.advance(machine.start(), b"[a]x[a")
    assert first != second
    assert mask_of(machine, first, trie, 3)[1] == mask_of(machine, second, trie, 3)[1] == 0
    beyond = [b"]x[", b"]y"]
    trie = make_trie(sort_tokens(range(len(beyond)), beyond))
    for config, expected in ((first, [1, 0]), (second, [0, 1])):
        mask, depth = mask_of(machine, config, trie, 2)
        assert (mask.tolist(), depth) == (expected, 1)
    assert machine.frames_read(first, 1) != machine.frames_read(second, 1)


def test_counts_matter_only_near_their_limits():
    machine = machine_of(ir.Repeat(ir.Literal(b"abc"), 0, 1000))
    keys = [machine.frames_read(machine.advance(machine.start(), b"abc" * n), 1) for n in (5, 50, 500, 995, 996)]
    assert keys[0] == keys[1] == keys[2] and len(set(keys)) == 3


def test_the_end_of_the_stack_is_part_of_what_was_read():
    tree = ir.seq(ir.Literal(b"("), ir.optional(ir.Call("tree")), ir.Literal(b")"))
    limits = Limits(stack=20)
    machine = machine_of(ir.Call("tree"), limits, tree=tree)
    low, high = (machine.advance(machine.start(), b"(" * depth) for depth in (5, 18))
    tokens = [b"((((", b")"]
    trie = make_trie(sort_tokens(range(2), tokens))
    assert mask_of(machine, low, trie, 2)[0].tolist() == [1, 1]
    assert mask_of(machine, high, trie, 2)[0].tolist() == [0, 1]
    assert machine.frames_read(low, 0) != machine.frames_read(high, 0)


def test_walks_have_fuel():
    machine = machine_of(ir.Repeat(ir.ByteSet(((0, 255),)), 0, None), Limits(mask_steps=50))
    tokens = random_tokens(random.Random(1))
    trie = make_trie(sort_tokens(range(len(tokens)), tokens))
    with pytest.raises(GrammarError, match="one token may take 50,"):
        mask_of(machine, machine.start(), trie, len(tokens))


def test_tokens_longer_than_the_rows_there_were():
    machine = machine_of(ir.Repeat(ir.Literal(b"ab"), 0, None))
    tokens = [b"ab" * 1000, b"ab" * 999 + b"b", b"a"]
    trie = make_trie(sort_tokens(range(3), tokens))
    assert mask_of(machine, machine.start(), trie, 3)[0].tolist() == [1, 0, 1]


CHARS = ordinary_chars(b'"\\')


def utf8() -> ir.Expr:
    """One character that a JSON string takes as it is, in its UTF-8."""

    def among(low: int, high: int) -> ir.Expr:
        return ir.ByteSet(((low, high),))

    more = among(0x80, 0xBF)
    return ir.alt(
        ir.ByteSet(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0x7F))),
        ir.seq(among(0xC2, 0xDF), more),
        ir.seq(among(0xE0, 0xE0), among(0xA0, 0xBF), more),
        ir.seq(ir.ByteSet(((0xE1, 0xEC), (0xEE, 0xEF))), more, more),
        ir.seq(among(0xED, 0xED), among(0x80, 0x9F), more),
        ir.seq(among(0xF0, 0xF0), among(0x90, 0xBF), more, more),
        ir.seq(among(0xF1, 0xF3), more, more, more),
        ir.seq(among(0xF4, 0xF4), among(0x80, 0x8F), more, more),
    )


@pytest.mark.parametrize("item", [utf8(), ir.Call("char")])
def test_a_string_takes_every_character_that_there_is_room_for(item):
    string = ir.seq(ir.Literal(b'"'), ir.Repeat(item, 5, 100), ir.Literal(b'"'))
    machine = machine_of(ir.seq(string, ir.Literal(b"\n")), char=utf8())
    assert not machine.accepts_all(machine.start(), CHARS, 1)[0]
    assert machine.accepts_all(machine.advance(machine.start(), b'"'), CHARS, 100)[0]
    assert not machine.accepts_all(machine.advance(machine.start(), b'"'), CHARS, 101)[0]
    after = machine.advance(machine.start(), b'"' + b"x" * 70)
    assert machine.accepts_all(after, CHARS, 30)[0] and not machine.accepts_all(after, CHARS, 31)[0]
    assert not machine.accepts_all(machine.advance(after, "ä".encode()[:1]), CHARS, 1)[0]


def test_not_every_character():
    machine = machine_of(ir.Repeat(ir.ByteSet(((0x20, 0x7E),)), 0, None))
    assert not machine.accepts_all(machine.start(), CHARS, 1)[0]


def test_items_of_several_to_a_character_are_not_mistaken_for_characters():
    machine = machine_of(ir.Repeat(ir.ByteSet(((0x20, 0xFF),)), 0, 100))
    assert not machine.accepts_all(machine.start(), CHARS, 90)[0]  # ninety characters may be 360 bytes


def test_items_that_exclude_one_another_are_not_taken_for_free():
    letters = ir.BagItem(utf8(), is_once=True)
    machine = machine_of(ir.Bag((letters, letters, letters), ir.EMPTY))
    assert machine.accepts_all(machine.start(), CHARS, 1)[0] is False


def test_accepts_all_agrees_with_walking():
    """Where it says yes, every token of such characters is allowed, and nothing of the exploration stays behind."""
    choose = random.Random(5)
    pool = ["a", "é", "本", "😀", "\x7e", "Z"]
    texts = ["".join(choose.choices(pool, k=choose.randint(1, 10))).encode() for _ in range(200)]
    trie = make_trie(sort_tokens(range(200), texts))
    string = ir.seq(ir.Literal(b'"'), ir.Repeat(utf8(), 0, 40), ir.Literal(b'"'))
    machine = machine_of(ir.Repeat(ir.Call("string"), 0, 3, ir.Literal(b",")), string=string)
    num_yes = 0
    for length in range(45):
        config = machine.advance(machine.start(), b'"x","' + b"y" * length)
        if config is None:
            assert length > 40
            continue
        frames = machine.num_frames
        if machine.accepts_all(config, CHARS, 10)[0]:
            num_yes += 1
            assert mask_of(machine, config, trie, 200)[0].all()
        else:
            assert length > 30
        assert machine.num_frames == frames
    assert num_yes == 31


def test_accepts_all_finds_the_same_while_tables_grow():
    """The chain has so many states that their table must be enlarged during the proof."""
    chain = ir.seq(*[utf8()] * 40, ir.Repeat(utf8(), 0, None))
    for _ in range(2):
        machine = machine_of(chain)
        assert machine.accepts_all(machine.start(), CHARS, 1_000)[0] and machine.num_states > 128
    config = machine.advance(machine.start(), b"abc")
    num_states = machine.num_states
    assert machine.accepts_all(config, CHARS, 1_000)[0] and machine.num_states == num_states


def test_what_no_frame_has_a_say_in_is_found_out_once():
    string = ir.seq(ir.Literal(b'"'), ir.Repeat(utf8(), 0, None), ir.Literal(b'"'))
    machine = Machine(build(ir.Grammar("root", {"root": string})), max_token_len=20)
    config = machine.advance(machine.start(), b'"')
    assert machine.accepts_all(config, CHARS, 10) == (True, 0) == machine.accepts_all(config, CHARS, 10)
    assert machine.accepts_all(machine.start(), CHARS, 10) == (False, 0)
    assert machine.is_dead(machine.start(), ord("e")) and not machine.is_dead(config, ord("e"))
    renamed = machine.compact([config])
    assert machine.accepts_all(renamed[config], CHARS, 10) == (True, 0)
    assert machine.accepts_all(machine.start(), CHARS, 10) == (False, 0)
