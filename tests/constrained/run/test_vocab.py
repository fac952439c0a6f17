"""Vocabulary, trie and slices: against the plain list of tokens."""

import re

import numpy as np
import pytest

from jsg.constrained.run.slices import ordinary_chars
from jsg.constrained.run.trie import MAX_TOKEN_BYTES, Trie, make_trie, sort_tokens
from jsg.constrained.run.vocab import Vocabulary
from jsg.constrained.special_tokens import special_bytes
from jsg.errors import GrammarError
from tests.constrained.vocabularies import (
    bits,
    odd_vocabulary,
    read_vocabulary,
    sentencepiece,
    tekken,
    tekken_tokens,
    utf8_lengths,
)


def tokens_of(trie: Trie) -> dict[int, bytes]:
    """Reads a trie back, and checks each field of each node."""
    found: dict[int, bytes] = {}
    path: list[tuple[int, int]] = []  # (depth, skip) of the nodes above
    text = bytearray()
    for node in range(1, len(trie.byte)):
        depth = int(trie.depth[node])
        while path and path[-1][0] >= depth:
            assert path.pop()[1] <= node, "a subtree goes on behind its end"
        assert depth == len(path) + 1
        assert not path or path[-1][1] > node, "a subtree ends too early"
        assert node < trie.skip[node] <= len(trie.byte)
        path.append((depth, int(trie.skip[node])))
        text[depth - 1 :] = [int(trie.byte[node])]
        ids = trie.tokens[trie.token_start[node] : trie.token_start[node + 1]].tolist()
        assert ids == sorted(ids)
        found |= dict.fromkeys(ids, bytes(text))
    assert trie.skip[0] == len(trie.byte) and trie.depth[0] == 0 and trie.token_start[1] == 0
    assert trie.token_start[-1] == len(trie.tokens) == len(found)
    return found


def children_differ(trie: Trie) -> bool:
    node_paths: set[tuple[int, ...]] = set()
    path: list[int] = []
    for node in range(1, len(trie.byte)):
        path[int(trie.depth[node]) - 1 :] = [int(trie.byte[node])]
        node_paths.add(tuple(path))
    return len(node_paths) == len(trie.byte) - 1


@pytest.mark.parametrize("seed", range(6))
def test_a_trie_holds_its_tokens_and_no_others(seed: int):
    rng = np.random.default_rng(seed)
    tokens = [bytes(rng.choice([0, 97, 98, 255], rng.integers(1, 7)).tolist()) for _ in range(60)]
    ids = sorted(rng.choice(500, len(tokens), replace=False).tolist())
    in_order = sort_tokens(ids, tokens)
    trie = make_trie(in_order)
    assert tokens_of(trie) == dict(zip(ids, tokens, strict=True))
    assert children_differ(trie)
    is_kept = rng.random(len(tokens)) < 0.4
    kept = set(in_order.ids[is_kept].tolist())
    part = make_trie(in_order.subset(is_kept))
    assert tokens_of(part) == {i: t for i, t in zip(ids, tokens, strict=True) if i in kept}
    assert children_differ(part)


def test_a_trie_of_nothing_is_its_root():
    trie = make_trie(sort_tokens((), ()))
    assert tokens_of(trie) == {}
    some = sort_tokens((3,), (b"x",))
    assert tokens_of(make_trie(some.subset(np.array([False])))) == {}


def test_the_trie_of_a_vocabulary_leaves_out_what_is_no_text():
    vocabulary = odd_vocabulary()
    no_text = {*vocabulary.special_ids, *vocabulary.eos_ids}
    expected = {
        i: t for i, t in enumerate(vocabulary.tokens) if t and i not in no_text and not {0xFE, 0xFF}.intersection(t)
    }
    assert tokens_of(vocabulary.trie) == expected
    assert {i: vocabulary.text_of(i) for i in expected} == expected
    assert all(vocabulary.text_of(i) == b"" for i in {-1, vocabulary.size, *range(vocabulary.size)} - set(expected))
    assert vocabulary.max_token_len == max(map(len, expected.values()))
    assert vocabulary.first_bytes == {t[0] for t in expected.values()}


def test_a_special_token_with_a_name_can_be_named_and_nothing_else_spells_it():
    tokens = [b"", b"<call>", b"a", b"\xff", b"call", b"\xfe", b"</s>"]
    names = {1: "<call>", 6: "</s>", 2: "a"}
    vocabulary = Vocabulary(tokens, (0, 1, 6), (6,), special_names=names)
    assert tokens_of(vocabulary.trie) == {1: special_bytes("<call>"), 2: b"a", 4: b"call"}
    assert vocabulary.text_of(1) == special_bytes("<call>") and vocabulary.text_of(6) == b""
    assert 1 not in bits(vocabulary.slices.text.mask)


def test_a_vocabulary_survives_being_sent_as_grammars_read_it():
    named = Vocabulary([b"<s>", b"a", b"<call>", b"\xff", b"ab"], (0, 2), (0,), size=40, special_names={2: "<call>"})
    for vocabulary in (odd_vocabulary(), named, Vocabulary([b""], (), ())):
        data = vocabulary.to_bytes()
        copy = read_vocabulary(data)
        assert copy.to_bytes() == data and (copy.size, copy.eos_ids) == (vocabulary.size, vocabulary.eos_ids)
        assert all(np.array_equal(a, b) for a, b in zip(copy.trie, vocabulary.trie, strict=True))
        assert [copy.text_of(i) for i in range(copy.size)] == [vocabulary.text_of(i) for i in range(copy.size)]


def test_masks_of_a_vocabulary():
    vocabulary = odd_vocabulary()
    assert vocabulary.num_words == -(-vocabulary.size // 32)
    assert bits(vocabulary.all_mask) == set(range(vocabulary.size)) and bits(vocabulary.eos_mask) == {1, 4}
    with pytest.raises(ValueError, match="read-only"):
        vocabulary.eos_mask[0] = 1


def is_ordinary(text: str, excluded: str) -> bool:
    return not any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 or c in excluded for c in text)


@pytest.mark.parametrize("make", [odd_vocabulary, sentencepiece, pytest.param(tekken, marks=pytest.mark.slow)])
def test_slices_are_the_ordinary_tokens(make):
    vocabulary = make()
    lengths = utf8_lengths(vocabulary.tokens)
    texts = {i: vocabulary.text_of(i) for i in range(len(vocabulary.tokens)) if vocabulary.text_of(i)}
    slices = vocabulary.slices
    previous: set[int] = set()
    for part in (slices.short, slices.long, slices.json, slices.text):
        excluded = "" if part is slices.text else '"\\'
        expected = {
            i
            for i, text in texts.items()
            if (lengths[i] or 99) <= part.max_chars and is_ordinary(text.decode(), excluded)
        }
        inside = bits(part.mask)
        assert inside == expected and inside >= previous
        assert set(part.rest.tokens.tolist()) == set(texts) - inside
        previous = inside
    for part, letters in ((slices.words, rb"[A-Za-z0-9_ ]*"), (slices.lower, rb"[a-z]*")):
        assert bits(part.mask) == {i for i, text in texts.items() if re.fullmatch(letters, text)}
        assert set(part.rest.tokens.tolist()) == set(texts) - bits(part.mask)
    for most, mask in enumerate(slices.room):
        assert bits(mask) == {i for i in bits(slices.json.mask) if (lengths[i] or 99) <= most}
    if vocabulary.size < 1000:
        parts = (slices.short, slices.long, slices.json, slices.text, slices.words, slices.lower)
        assert all(tokens_of(part.rest).keys() == set(texts) - bits(part.mask) for part in parts)


def test_slices_take_most_of_a_real_vocabulary():
    slices = tekken().slices
    sizes = [len(bits(part.mask)) for part in (slices.short, slices.long, slices.json, slices.text)]
    assert sizes == sorted(sizes) and sizes[0] > 115_000 and sizes[-1] > 125_000


def test_the_rest_of_a_slice_is_a_sound_trie():
    part = tekken().slices.long
    read = tokens_of(part.rest)
    assert all(read[i] == tekken_tokens()[i] for i in read)
    assert children_differ(part.rest)


@pytest.mark.parametrize("excluded", ["", '"\\'])
def test_ordinary_characters_are_an_automaton_over_utf8(excluded: str):
    table = ordinary_chars(excluded.encode())

    def is_accepted(data: bytes) -> bool:
        state = 0
        for byte in data:
            if (state := int(table[state, byte])) < 0:
                return False
        return state == 0

    for code in [*range(0x3000), *range(0xD7F0, 0xD800), *range(0xE000, 0xE010), 0xFFFF, 0x10000, 0x3FFFF, 0x40000]:
        assert is_accepted(chr(code).encode()) == is_ordinary(chr(code), excluded), hex(code)
    assert is_accepted(chr(0x10FFFF).encode())
    for bad in (
        b"\xc0\x80",
        b"\xc1\xbf",
        b"\xe0\x80\x80",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xf0\x80\x80\x80",
        b"\xff",
    ):
        assert not is_accepted(bad)


def test_real_vocabularies_have_the_oddities_that_they_are_here_for():
    pieces = sentencepiece()
    texts = [pieces.text_of(i) for i in range(pieces.size)]
    assert texts.count(b"A") == 2 and len(set(texts)) < len([t for t in texts if t])
    assert len([n for n in utf8_lengths(tekken_tokens()) if n is None]) == 1435
    assert tekken().size == 131_072 and tekken().max_token_len == 76


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([b"a"], (1,), ()), "special_ids must be in"),
        (([b"a"], (-1,), ()), "special_ids must be in"),
        (([b"a"], (), (7,)), "eos_ids must be in"),
        (([], (), ()), "must have a token"),
        ((["a"], (), ()), "must be bytes"),
        (([b"a" * (MAX_TOKEN_BYTES + 1)], (), ()), "at most 65535 bytes"),
    ],
)
def test_a_wrong_vocabulary_is_refused(arguments, words: str):
    with pytest.raises(GrammarError, match=words):
        Vocabulary(*arguments)


def test_more_tokens_than_rows_are_refused():
    with pytest.raises(GrammarError, match="3 tokens and 2 rows"):
        Vocabulary([b"a", b"b", b"c"], (), (), size=2)


def test_a_vocabulary_without_text_or_end_can_be_made():
    vocabulary = Vocabulary([b"", b""], (), ())
    assert (
        not any(bits(mask) for mask in (vocabulary.slices.text.mask, vocabulary.slices.lower.mask))
        and vocabulary.max_token_len == 0
        and not vocabulary.eos_mask.any()
    )
