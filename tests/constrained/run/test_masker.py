"""Masks against brute force, and maskers against a plain list of what was accepted."""

import gc
import random
import threading
import tracemalloc
import unittest.mock
from collections.abc import Callable

import numpy as np
import pytest

from jsg.constrained.build.builder import build
from jsg.constrained.grammar import CompiledGrammar, GrammarMasker
from jsg.constrained.ir import ByteSet, Grammar, Literal, Repeat, Words, alt, literal, optional, seq
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.run.slices import make_slices
from jsg.constrained.run.trie import sort_tokens
from jsg.constrained.run.vocab import Vocabulary
from jsg.errors import GrammarError
from tests.constrained.oracle import OracleMachine, rule
from tests.constrained.samples import SAMPLES, json_grammar
from tests.constrained.vocabularies import bits, odd_vocabulary, sentencepiece, tekken, tokenize, word_vocabulary

type MakeMasker = Callable[..., GrammarMasker]
MEMO_BYTES = 8 << 20


@pytest.fixture(params=["oracle", "machine"])
def new_masker(request: pytest.FixtureRequest) -> MakeMasker:
    """Maskers on the slow machine, which tests the maskers themselves, and on the real one."""

    def make(
        grammar: Grammar, vocabulary: Vocabulary, memo_bytes: int = MEMO_BYTES, limits: Limits = LIMITS
    ) -> GrammarMasker:
        if request.param == "machine":
            return CompiledGrammar(build(grammar), vocabulary, limits, memo_bytes).new_masker()
        with unittest.mock.patch("jsg.constrained.grammar.Machine", return_value=OracleMachine(grammar)):
            return CompiledGrammar(build(grammar), vocabulary, memo_bytes=memo_bytes).new_masker()

    return make


def allowed(masker: GrammarMasker, vocabulary: Vocabulary) -> set[int]:
    out = np.full(vocabulary.num_words, 0xDEADBEEF, np.uint32)
    if masker.fill_mask(out):
        return bits(out)
    assert (out == 0xDEADBEEF).all(), "a mask that allows all was written"
    return set(range(vocabulary.size))


class BruteForce:
    """Every token by itself, by the slow machine."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary):
        self._machine = OracleMachine(grammar)
        self._vocabulary = vocabulary
        self.config = self._machine.start()

    def advance(self, token_id: int) -> None:
        config = self._machine.advance(self.config, self._vocabulary.text_of(token_id))
        assert config is not None
        self.config = config

    @property
    def is_complete(self) -> bool:
        return self._machine.is_accepting(self.config)

    def is_allowed(self, token_id: int) -> bool:
        if token_id in self._vocabulary.eos_ids:
            return self.is_complete
        text = self._vocabulary.text_of(token_id)
        return bool(text) and self._machine.advance(self.config, text) is not None

    def allowed(self) -> set[int]:
        return {i for i in range(self._vocabulary.size) if self.is_allowed(i)}


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_bit_of_a_mask_is_what_brute_force_says(new_masker: MakeMasker, sample: str):
    vocabulary = odd_vocabulary()
    grammar = SAMPLES[sample][0]()
    for seed in range(1):
        rng = np.random.default_rng(seed)
        masker, brute = new_masker(grammar, vocabulary), BruteForce(grammar, vocabulary)
        for _ in range(25):
            expected = brute.allowed()
            assert allowed(masker, vocabulary) == expected
            assert masker.is_complete() == brute.is_complete
            going_on = sorted(expected - set(vocabulary.eos_ids))
            if not going_on:
                break
            token = int(rng.choice(going_on))
            assert masker.accept(token)
            brute.advance(token)
        refused = sorted(set(range(-1, vocabulary.size + 1)) - brute.allowed())
        before = masker.num_accepted
        assert not any(masker.accept(token) for token in refused)
        assert masker.num_accepted == before and allowed(masker, vocabulary) == brute.allowed()


@pytest.mark.parametrize(
    ("sample", "make_vocabulary"),
    [("json", tekken), ("text", tekken), ("record", sentencepiece), ("bag", sentencepiece), ("words", sentencepiece)],
)
def test_masks_of_real_vocabularies_are_what_brute_force_says_of_sampled_tokens(sample: str, make_vocabulary):
    make_grammar, text = SAMPLES[sample]
    vocabulary, grammar = make_vocabulary(), make_grammar()
    rng = np.random.default_rng(5)
    masker = CompiledGrammar(build(grammar), vocabulary).new_masker()
    brute = BruteForce(grammar, vocabulary)
    for token in tokenize(vocabulary, text.encode()):
        mask = allowed(masker, vocabulary)
        sampled = rng.integers(0, vocabulary.size, 20).tolist()
        likely = rng.choice(sorted(mask), min(10, len(mask)), replace=False).tolist()
        for other in (*sampled, *likely, *vocabulary.eos_ids):
            assert (other in mask) == brute.is_allowed(other), vocabulary.text_of(other)
        assert token in mask and masker.accept(token)
        brute.advance(token)
    assert masker.is_complete() and brute.is_complete


LOWER, LETTERS = ByteSet(((0x61, 0x7A),)), ByteSet(((0x41, 0x5A), (0x61, 0x7A)))
WORDS = ByteSet(((0x20, 0x20), (0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
PARTLY = {
    "lower": (lambda: rule(seq(Repeat(LOWER, 1, None), literal("."))), "lowercase."),
    "letters": (lambda: rule(Repeat(LETTERS, 1, 30)), "FewMoreLetters"),
    "words": (lambda: rule(seq(Repeat(WORDS, 3, 40), literal("!"))), "Words_and 12 more of them!"),
}


@pytest.mark.parametrize("sample", ["json", "record", "bag", "text", *PARTLY])
def test_masks_with_slices_are_those_of_walks_over_everything(sample: str):
    make_grammar, text = (SAMPLES | PARTLY)[sample]
    vocabulary = tekken()
    plain = Vocabulary(vocabulary.tokens, vocabulary.special_ids, vocabulary.eos_ids)
    nothing = make_slices(sort_tokens((), ()), vocabulary.num_words)
    plain.slices = nothing._replace(
        **{name: getattr(nothing, name)._replace(rest=plain.trie) for name in nothing._fields if name != "room"}
    )
    static = build(make_grammar())
    sliced = CompiledGrammar(static, vocabulary).new_masker()
    walked = CompiledGrammar(static, plain, Limits(text_steps=10**12)).new_masker()  # without slices it takes long
    # One byte a token: as many states as can be.
    spelled = [vocabulary.tokens.index(bytes([byte])) for byte in text.encode()]
    compared = 0
    for place, token in enumerate(spelled):
        if place % max(len(spelled) // 60, 1) == 0:
            assert sliced.mask_key() == walked.mask_key()
            compared += 1
        assert sliced.accept(token) and walked.accept(token)
    assert sliced.mask_key() == walked.mask_key() and compared >= min(50, len(spelled))


def test_far_from_the_ends_of_a_count_masks_are_shared():
    string = seq(literal('"'), Repeat(ByteSet(((0x23, 0x7E),)), 10, 2_000), literal('"'))
    vocabulary = tekken()
    compiled = CompiledGrammar(build(rule(string)), vocabulary)
    masker, letter = compiled.new_masker(), tokenize(vocabulary, b"x")[0]
    assert masker.accept(tokenize(vocabulary, b'"')[0])
    keys = []
    for _ in range(2_000):
        keys.append(masker.mask_key())
        assert masker.accept(letter)
    far = keys[10 : 2_000 - vocabulary.max_token_len]
    assert len(set(far)) == 1 and keys[0] != far[0] != keys[-1]
    assert compiled.masks._entry_bytes < 200 * 1_000  # pyright: ignore[reportPrivateUsage]


def replay(masker: GrammarMasker, fresh: GrammarMasker, history: list[int], vocabulary: Vocabulary) -> None:
    """Checks that a masker answers as one that read the same tokens and nothing else."""
    assert all(fresh.accept(token) for token in history)
    assert masker.num_accepted == len(history) and masker.is_complete() == fresh.is_complete()
    assert masker.is_finished() == fresh.is_finished() and masker.forced_bytes() == fresh.forced_bytes()
    assert masker.mask_key() == fresh.mask_key()
    assert allowed(masker, vocabulary) == allowed(fresh, vocabulary)


@pytest.mark.parametrize(("sample", "memo_bytes"), [("json", 0), ("bag", MEMO_BYTES), ("record", 20_000)])
def test_rollback_fork_and_replay_in_any_order(new_masker: MakeMasker, sample: str, memo_bytes: int):
    vocabulary = odd_vocabulary()
    grammar = SAMPLES[sample][0]()
    limits = Limits(machine_bytes=500_000) if memo_bytes == 0 else LIMITS
    rng = np.random.default_rng(len(sample) + memo_bytes)
    first = new_masker(grammar, vocabulary, memo_bytes, limits)
    reference = new_masker(grammar, vocabulary)
    cursors: list[tuple[GrammarMasker, list[int]]] = [(first, [])]
    for step in range(40):
        i = int(rng.integers(len(cursors)))
        masker, history = cursors[i]
        what = rng.random()
        if what < 0.75:
            if masker.is_finished():
                continue
            token = int(rng.choice(sorted(allowed(masker, vocabulary))))
            assert masker.accept(token)
            history.append(token)
        elif what < 0.9:
            count = int(rng.integers(0, min(len(history), 6) + 1))
            masker.rollback(count)
            del history[len(history) - count :]
        elif len(cursors) < 4:
            cursors.append((masker.fork(), history.copy()))
        else:
            cursors.pop(i)
        if not cursors:
            break
        if step % 5 == 0:
            for masker, history in cursors:
                replay(masker, GrammarMasker(reference.grammar), history, vocabulary)
    for masker, history in cursors:
        replay(masker, GrammarMasker(reference.grammar), history, vocabulary)


def test_maskers_of_one_grammar_do_not_disturb_each_other(new_masker: MakeMasker):
    vocabulary = odd_vocabulary()
    first = new_masker(json_grammar(), vocabulary)
    second = GrammarMasker(first.grammar)
    start = allowed(second, vocabulary)
    for token in tokenize(vocabulary, b'{"a": [1, 2'):
        assert first.accept(token)
    assert second.num_accepted == 0 and allowed(second, vocabulary) == start
    for token in tokenize(vocabulary, b"[["):
        assert second.accept(token)
    one, two = allowed(first, vocabulary), allowed(second, vocabulary)
    first.rollback(2)
    assert allowed(second, vocabulary) == two
    assert all(first.accept(token) for token in tokenize(vocabulary, b" 2"))
    assert allowed(first, vocabulary) == one


def test_forgetting_changes_no_answer_and_keeps_what_cursors_stand_on(new_masker: MakeMasker):
    vocabulary = odd_vocabulary()
    masker = new_masker(json_grammar(), vocabulary)
    tokens = tokenize(vocabulary, b'[{"k": [[1], "x"], "l": [true, [')
    keys = []
    for token in tokens:
        keys.append(masker.mask_key())
        assert masker.accept(token)
    other = masker.fork()
    masker.grammar.forget()
    masker.rollback(3)
    masker.grammar.forget()
    for back in range(len(tokens) - 4, -1, -1):
        masker.rollback(1)
        assert masker.mask_key() == keys[back]
    assert other.accept(tokenize(vocabulary, b"]")[0]) and other.num_accepted == len(tokens) + 1


def test_a_committed_text_holds_one_place():
    """It held each that it had passed: forgetting the others took 480 ms in a text of 120 000 counted items."""
    vocabulary = odd_vocabulary()
    masker = CompiledGrammar(build(rule(Repeat(ByteSet(((97, 98),)), 5_000, 5_001))), vocabulary).new_masker()
    (letter,) = tokenize(vocabulary, b"a")
    for _ in range(1_000):
        assert masker.accept(letter)
    other, machine = masker.fork(), masker.grammar.machine
    masker.grammar.forget()
    assert machine.num_frames >= 1_000, "all may be taken back"
    masker.commit()
    other.commit()
    assert other.accept(letter)
    before = masker.mask_key(), other.mask_key()
    masker.grammar.forget()
    assert machine.num_frames <= 2
    assert (masker.mask_key(), other.mask_key()) == before
    assert (masker.num_accepted, other.num_accepted) == (1_000, 1_001)
    with pytest.raises(ValueError, match="no more tokens than the 1 accepted since the last commit"):
        other.rollback(2)
    other.rollback(1)
    replay(other, GrammarMasker(masker.grammar), [letter] * 1_000, vocabulary)


def test_the_memo_is_bounded(new_masker: MakeMasker):
    vocabulary = odd_vocabulary()
    limit = 100_000
    masker = new_masker(json_grammar(), vocabulary, limit)
    rng = np.random.default_rng(3)
    bound, start = masker.grammar, masker.fork()
    most = 0
    for _ in range(40):
        masker = start.fork()
        for _ in range(30):
            tokens = sorted(allowed(masker, vocabulary))
            assert masker.accept(int(rng.choice(tokens)))
            most = max(most, bound.masks.num_bytes + bound._link_bytes)
    assert limit / 2 < most <= limit


def test_keys_name_masks(new_masker: MakeMasker):
    vocabulary = odd_vocabulary()
    masker = new_masker(json_grammar(), vocabulary)
    by_key: dict[bytes | None, set[int]] = {}
    keys = []
    for token in tokenize(vocabulary, b'{"a": [1, 2, {"a": "a"}], "abc": ["abc", 12], "a": -1}'):
        mask = allowed(masker, vocabulary)
        key = masker.mask_key()
        assert by_key.setdefault(key, mask) == mask
        keys.append(key)
        assert masker.accept(token)
    assert len({frozenset(mask) for mask in by_key.values()}) == len(by_key) < len(keys)
    again = GrammarMasker(masker.grammar)
    for token, key in zip(tokenize(vocabulary, b'{"a": [1'), keys, strict=False):
        assert again.mask_key() == key and again.accept(token)


def test_where_all_tokens_are_allowed_there_is_no_mask(new_masker: MakeMasker):
    vocabulary = Vocabulary([b"a", b"b", b"ab", b"c"], (), (3,))
    masker = new_masker(rule(Repeat(ByteSet(((97, 98),)), 0, None)), vocabulary)
    out = np.zeros(1, np.uint32)
    assert not masker.fill_mask(out) and not out.any() and masker.mask_key() is None
    masker = new_masker(rule(Repeat(ByteSet(((97, 98),)), 1, None)), vocabulary)
    assert masker.fill_mask(out) and bits(out) == {0, 1, 2} and masker.mask_key() is not None


def test_after_eos_the_text_is_over(new_masker: MakeMasker):
    vocabulary = odd_vocabulary()
    masker = new_masker(rule(Repeat(literal("ab"), 1, 2)), vocabulary)
    ab = tokenize(vocabulary, b"ab")[0]
    assert not masker.accept(1) and masker.accept(ab) and masker.is_complete() and not masker.is_finished()
    assert masker.accept(1)
    assert masker.is_complete() and masker.is_finished() and masker.forced_bytes() == b""
    assert allowed(masker, vocabulary) == {1, 4}
    assert not masker.accept(ab) and masker.accept(4) and masker.num_accepted == 3
    masker.grammar.forget()
    assert allowed(masker, vocabulary) == {1, 4} and masker.accept(1)
    masker.rollback(3)
    assert masker.num_accepted == 1 and masker.accept(ab) and masker.is_finished()
    assert allowed(masker, vocabulary) == {1, 4}


def test_eos_is_allowed_exactly_where_a_text_is_complete(new_masker: MakeMasker):
    vocabulary = odd_vocabulary()
    masker = new_masker(rule(seq(literal("a"), optional(literal("bc")))), vocabulary)
    found = []
    for token in (None, *tokenize(vocabulary, b"a"), *tokenize(vocabulary, b"b")[:1], *tokenize(vocabulary, b"c")):
        assert token is None or masker.accept(token)
        found.append({1, 4} <= allowed(masker, vocabulary))
        assert found[-1] == masker.is_complete()
    assert found == [False, True, False, True]


def test_the_text_of_an_eos_token_is_never_matched(new_masker: MakeMasker):
    vocabulary = Vocabulary([b"ab", b"ab", b"a"], (), (1,))
    masker = new_masker(rule(literal("ab")), vocabulary)
    assert allowed(masker, vocabulary) == {0, 2} and not masker.accept(1) and masker.accept(0)


def test_forced_bytes_are_those_without_a_choice(new_masker: MakeMasker):
    vocabulary = odd_vocabulary()
    grammar = rule(seq(literal('{"é'), Words((b"a", b"b")), literal('": '), optional(literal("éé"))))
    masker = new_masker(grammar, vocabulary)
    assert masker.forced_bytes() == '{"é'.encode()
    masker.accept(tokenize(vocabulary, b"{")[0])
    assert masker.forced_bytes() == '"é'.encode()
    for token in tokenize(vocabulary, '"é'.encode()):
        assert masker.accept(token)
    assert masker.forced_bytes() == b""
    assert masker.accept(tokenize(vocabulary, b"a")[0]) and masker.forced_bytes() == b'": '
    for token in tokenize(vocabulary, b'": '):
        assert masker.accept(token)
    assert masker.forced_bytes() == b"", "the text may end here"


def test_a_forced_run_does_not_end_inside_a_character(new_masker: MakeMasker):
    masker = new_masker(rule(alt(literal("é"), literal("è"))), odd_vocabulary())
    assert masker.forced_bytes() == b""


@pytest.mark.parametrize("count", [-1, 3])
def test_a_rollback_of_more_than_was_accepted_is_refused(new_masker: MakeMasker, count: int):
    vocabulary = odd_vocabulary()
    masker = new_masker(json_grammar(), vocabulary)
    assert all(masker.accept(token) for token in tokenize(vocabulary, b"[ ["[:1] * 2))
    with pytest.raises(ValueError, match="the 2 accepted"):
        masker.rollback(count)
    assert masker.num_accepted == 2


def test_text_that_the_vocabulary_cannot_spell_is_a_dead_end_with_a_name(new_masker: MakeMasker):
    vocabulary = word_vocabulary(b"a", b"xb")
    masker = new_masker(rule(Words((b"aq", b"ax"))), vocabulary)
    assert masker.accept(1)
    for ask in (masker.mask_key, lambda: masker.fill_mask(np.zeros(vocabulary.num_words, np.uint32))):
        with pytest.raises(GrammarError, match=r"asks for 0x71, 0x78 and no token continues with that"):
            ask()
    masker = new_masker(rule(seq(literal("a"), ByteSet(((0x80, 0xBF),)))), vocabulary)
    assert masker.accept(1)
    with pytest.raises(GrammarError, match=r"0x80, .*0x87 and 56 others and no token begins with that"):
        masker.mask_key()


def test_a_complete_text_without_an_eos_token_is_finished_and_has_no_mask(new_masker: MakeMasker):
    masker = new_masker(rule(literal("a")), Vocabulary([b"a"], (), ()))
    assert masker.accept(0) and masker.is_complete() and masker.is_finished()
    with pytest.raises(GrammarError, match="EOS token"):
        masker.mask_key()


def test_states_above_the_limit_end_in_an_error_and_not_in_memory():
    binary = ByteSet(((0x61, 0x62),))
    grammar = rule(seq(Repeat(binary, 0, None), Literal(b"a"), *[binary] * 20))
    words = [format(i, "012b").replace("0", "a").replace("1", "b").encode() for i in range(4096)]
    masker = CompiledGrammar(build(grammar), word_vocabulary(b"a", b"b", *words), Limits(states=500)).new_masker()
    with pytest.raises(GrammarError, match="500"):
        masker.mask_key()


def test_one_text_that_needs_too_many_states_leaves_the_others_theirs():
    binary = ByteSet(((0x61, 0x62),))
    grammar = rule(seq(Repeat(binary, 0, None), Literal(b"a"), *[binary] * 20))
    compiled = CompiledGrammar(build(grammar), word_vocabulary(b"a", b"b", b"ab", b"bb"), Limits(states=300))
    chance, early = random.Random(2), compiled.new_masker()
    assert early.accept(1) and early.accept(2)
    for _ in range(30):  # each of them makes states of its own
        masker, text = compiled.new_masker(), ""
        for token in chance.choices((1, 2, 3, 4), k=40):
            masker.mask_key()
            assert masker.accept(token)
            text += ("", "a", "b", "ab", "bb")[token]
            assert masker.is_complete() == (len(text) > 20 and text[-21] == "a")
        assert masker.grammar.machine.num_states <= 300
    text = "ab"
    for token in (1, 2, 3, 4) * 5:
        assert early.accept(token)
        text += ("", "a", "b", "ab", "bb")[token]
        assert early.is_complete() == (len(text) > 20 and text[-21] == "a")


def test_after_an_error_for_want_of_states_the_grammar_goes_on():
    binary = ByteSet(((0x61, 0x62),))
    grammar = rule(alt(literal("c" * 50), seq(Repeat(binary, 0, None), Literal(b"a"), *[binary] * 20)))
    words = [format(i, "012b").replace("0", "a").replace("1", "b").encode() for i in range(4096)]
    compiled = CompiledGrammar(build(grammar), word_vocabulary(b"a", b"b", b"c", *words), Limits(states=500))
    for _ in range(3):
        with pytest.raises(GrammarError, match="500"):
            compiled.new_masker().mask_key()
        masker = compiled.new_masker()
        assert masker.accept(3) and masker.forced_bytes() == b"c" * 49


def test_threads_share_a_grammar_without_disturbing_each_other(new_masker: MakeMasker):
    vocabulary = odd_vocabulary()
    reference = new_masker(json_grammar(), vocabulary)
    texts = [b'{"a": [1, 2, true], "b": {}}', b'[[["abc", 12], []], {"x": "y"}]', b'"abcabcabcabcabc"', b"-1.25"]
    expected = []
    for text in texts:
        masker = GrammarMasker(reference.grammar)
        expected.append([(masker.mask_key(), masker.accept(token)) for token in tokenize(vocabulary, text)])
    shared = new_masker(json_grammar(), vocabulary, memo_bytes=30_000, limits=Limits(machine_bytes=500_000)).grammar
    wrong: list[bytes] = []

    def read(text: bytes, answers: list[tuple[bytes | None, bool]]) -> None:
        for _ in range(10):
            masker = GrammarMasker(shared)
            found = [(masker.mask_key(), masker.accept(token)) for token in tokenize(vocabulary, text)]
            if found != answers or not masker.is_complete():
                wrong.append(text)

    threads = [threading.Thread(target=read, args=pair) for pair in zip(texts, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_grammar_says_how_much_memory_it_takes():
    vocabulary = odd_vocabulary()
    tables = build(json_grammar())
    grammar = CompiledGrammar(tables, vocabulary)
    before = grammar.num_bytes
    masker = grammar.new_masker()
    for token in tokenize(vocabulary, b'{"a": [1]}'):
        masker.mask_key()
        assert masker.accept(token)
    assert grammar.num_bytes > before > tables.num_bytes


def test_the_memory_that_a_grammar_says_is_what_it_takes():
    """Arrays and Python's objects, as tracemalloc counts them; the first grammar brings what all of them share."""
    vocabulary, tables = odd_vocabulary(), build(json_grammar())
    tokens = tokenize(vocabulary, b'{"a": [1, "bc", true], "d": {"e": null}, "f": ""}')

    def read() -> CompiledGrammar:
        masker = GrammarMasker(CompiledGrammar(tables, vocabulary))
        for token in tokens:
            masker.mask_key()
            masker.forced_bytes()
            assert masker.accept(token)
        return masker.grammar

    read()
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        grammars = [read() for _ in range(4)]
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    said = sum(grammar.num_bytes - tables.num_bytes for grammar in grammars)  # they share their tables here
    assert 0.9 < said / taken < 1.1
