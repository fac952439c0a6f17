"""Valid values written in several ways and cut into tokens in many: each token must be allowed.

Values that are not valid must be refused. A text is divided into tokens by the tokenizer's own encoder, byte by byte,
greedily, and at random. The tokenizers are byte-level BPE, and sentencepiece with byte fallback, in which single bytes
have two tokens.
"""

import functools
import itertools
import json
import pathlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from jsg.constrained.compiler import compile_grammar
from jsg.constrained.grammar import CompiledGrammar, GrammarMasker
from jsg.constrained.run.vocab import Vocabulary
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained import aids, scoreboard
from tests.constrained.vocabularies import sentencepiece, tekken, tokenize

type Data = Callable[[str], pathlib.Path]

VOCABULARIES = {"tekken": tekken, "sentencepiece": sentencepiece}
LONGEST = 600
SPELLINGS: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":")},
    "fixed": {},
    "indented": {"indent": 2},
    "tabs": {"indent": "\t"},
    "spaced colons only": {"separators": (",", ": ")},
}
TAKEN = {"compact": ("compact",), "fixed": ("fixed",), "flexible": tuple(SPELLINGS)}
"""By white space: the spellings that it takes."""
TOO_DEEP, TOO_DEEP_TABS = "\n" + 9 * " ", "\n" + 9 * "\t"
"""Indents are at most 8 signs wide."""

SCHEMA = {
    "type": "object",
    "properties": {
        "naïve": {"type": "string", "minLength": 1, "maxLength": 40},
        "kind": {"enum": ["größe", "tab\there", "😀", 12.5, None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-zäöü ]+$"}},
        "deep": {"type": "array", "items": {"type": ["number", "boolean", "object"]}},
    },
    "required": ["naïve", "kind"],
}
VALUES = [
    {"naïve": 'Zoë said "hi" \\ ok/then 東京 😀\n', "kind": "größe", "tags": ["äpfel und birnen", "x"], "deep": []},
    {"naïve": "é", "kind": "tab\there", "deep": [1, -2.5e-7, 1e22, True, {}, {"a": [None, "\u007f\u0001"]}]},
    {"naïve": "𝄞" * 40, "kind": None, "more": {"of": [[], {"it": "…"}]}},
    {"naïve": "\u2028\ufeff", "kind": 12.5, "tags": []},
    {"naïve": "x", "kind": "😀", "": {"": ""}},
]
WRONG = [
    {"naïve": "𝄞" * 41, "kind": None},
    {"naïve": "", "kind": None},
    {"naïve": "x", "kind": "grösse"},
    {"naïve": "x", "kind": 12.5, "tags": ["Äpfel"]},
    {"naïve": "x", "kind": 12.5, "deep": ["x"]},
    {"naïve": "x"},
    [],
    "naïve",
]


def _known(schema: Any) -> Iterator[str]:
    """The strings in a schema that are not ASCII. Names and constants among them have one spelling."""
    if isinstance(schema, str):
        yield from () if schema.isascii() else (schema,)
    elif isinstance(schema, list | dict):
        for part in (*schema, *(schema.values() if isinstance(schema, dict) else ())):
            yield from _known(part)


def _texts(value: Any, whitespace: str, schema: Any) -> Iterator[str]:
    """The spellings of a value that a white space takes, each as ASCII (but for what the schema names) and not."""
    for spelling in TAKEN[whitespace]:
        for is_ascii in (False, True):
            text = json.dumps(value, ensure_ascii=is_ascii, **SPELLINGS[spelling])
            for known in _known(schema):
                text = text.replace(json.dumps(known), json.dumps(known, ensure_ascii=False))
            if TOO_DEEP not in text and TOO_DEEP_TABS not in text:
                yield text


@functools.cache
def _ids(vocabulary: Vocabulary) -> dict[bytes, list[int]]:
    """The tokens of each text; several where it has duplicates."""
    ids: dict[bytes, list[int]] = {}
    for i, _ in enumerate(vocabulary.tokens):
        if vocabulary.text_of(i):
            ids.setdefault(vocabulary.text_of(i), []).append(i)
    return ids


def _at_random(vocabulary: Vocabulary, text: bytes, chance: random.Random, longest: int) -> list[int]:
    """Tokens of at most `longest` bytes that spell a text, any of those that fit at each place."""
    ids, found, start = _ids(vocabulary), [], 0
    while start < len(text):
        fitting = [n for n in range(1, longest + 1) if start + n <= len(text) and text[start : start + n] in ids]
        length = chance.choice(fitting)
        found.append(chance.choice(ids[text[start : start + length]]))
        start += length
    return found


def _cuts(vocabulary: Vocabulary, text: str, seed: str) -> Iterator[list[int]]:
    """A text in tokens, in many ways."""
    chance, data = random.Random(seed + text), text.encode()
    yield tokenize(vocabulary, data)
    yield _at_random(vocabulary, data, chance, 1)
    yield _at_random(vocabulary, data, chance, 3)
    yield _at_random(vocabulary, data, chance, 12)
    if vocabulary is tekken():
        yield aids.tekken_encode(text)


class Reader:
    """Reads token by token and checks what a masker says at each."""

    def __init__(self, grammar: CompiledGrammar):
        self._vocabulary = grammar.vocabulary
        self._grammar = grammar
        self._mask = np.zeros(grammar.vocabulary.num_words, np.uint32)

    def _allows(self, masker: GrammarMasker, token: int) -> bool:
        if not masker.fill_mask(self._mask):
            return True
        return bool(int(self._mask[token >> 5]) >> (token & 31) & 1)

    def refused_at(self, ids: list[int]) -> int | None:
        """The number of the first token that is refused, or of the end; None where the text is taken.

        Asserts that masks and `accept` agree, and that EOS tokens are allowed exactly where the text is complete.
        """
        masker = self._grammar.new_masker()
        for i, token in enumerate(ids):
            is_allowed = self._allows(masker, token)
            for eos in self._vocabulary.eos_ids:
                assert self._allows(masker, eos) == masker.is_complete()
            assert masker.accept(token) == is_allowed
            if not is_allowed:
                return i
        for eos in self._vocabulary.eos_ids:
            assert self._allows(masker, eos) == masker.is_complete()
        return None if masker.is_complete() and masker.accept(self._vocabulary.eos_ids[0]) else len(ids)

    def check_rollback(self, ids: list[int], chance: random.Random) -> None:
        """Asserts that going back and reading on gives the masks of the first time, on what was read or elsewhere."""
        masker = self._grammar.new_masker()
        keys: list[bytes | None] = []
        for token in ids:
            keys.append(masker.mask_key())
            assert masker.accept(token)
        keys.append(masker.mask_key())
        for _ in range(3):
            back = chance.randint(1, len(ids))
            masker.rollback(back)
            fork, elsewhere = masker.fork(), chance.choice(range(self._vocabulary.size))
            if fork.accept(elsewhere):
                fork.mask_key()
            for i in range(len(ids) - back, len(ids)):
                assert masker.mask_key() == keys[i] and masker.accept(ids[i])
            assert masker.mask_key() == keys[-1] and masker.num_accepted == len(ids)
        masker.rollback(len(ids))
        assert masker.mask_key() == keys[0] and not masker.is_complete()


def _grammar(schema: Any, vocabulary: Vocabulary, whitespace: str, order: str) -> CompiledGrammar:
    spec = GrammarSpec("json_schema", json.dumps(schema), whitespace, order, "open")  # pyright: ignore[reportArgumentType]
    return compile_grammar(spec, vocabulary)


GRID = list(itertools.product(VOCABULARIES, aids.WHITESPACES, aids.ORDERS))
QUICK = [("tekken", "flexible", "free"), ("tekken", "fixed", "declared"), ("sentencepiece", "compact", "free")]
LONG_IF = {"declared": [], "free": [pytest.mark.long]}


@pytest.mark.parametrize(
    ("name", "whitespace", "order"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow, *LONG_IF[case[2]]]) for case in GRID],
)
def test_valid_values_are_taken_however_they_are_written_and_cut(name: str, whitespace: str, order: str) -> None:
    """In any order they are long: a fast one with each vocabulary is in any order."""
    vocabulary = VOCABULARIES[name]()
    reader = Reader(_grammar(SCHEMA, vocabulary, whitespace, order))
    for value in VALUES:
        for text in _texts(value, whitespace, SCHEMA):
            chance = random.Random(text)
            for ids in _cuts(vocabulary, text, name):
                assert b"".join(map(vocabulary.text_of, ids)).decode() == text
                assert reader.refused_at(ids) is None, (text, [vocabulary.text_of(i) for i in ids])
                if chance.random() < 0.2:
                    reader.check_rollback(ids, chance)


@pytest.mark.parametrize("name", VOCABULARIES)
def test_values_that_are_not_valid_are_stopped_however_they_are_cut(name: str) -> None:
    vocabulary = VOCABULARIES[name]()
    reader = Reader(_grammar(SCHEMA, vocabulary, "flexible", "free"))
    for value in WRONG:
        for text in _texts(value, "flexible", SCHEMA):
            assert all(reader.refused_at(ids) is not None for ids in _cuts(vocabulary, text, name)), text


def test_an_order_that_was_not_declared_is_taken_only_where_it_is_free() -> None:
    value = {"kind": None, "naïve": "x"}
    free, declared = (Reader(_grammar(SCHEMA, tekken(), "fixed", order)) for order in ("free", "declared"))
    ids = aids.tekken_encode(json.dumps(value, ensure_ascii=False))
    assert free.refused_at(ids) is None and declared.refused_at(ids) is not None


def _check_maskbench(cases: list[scoreboard.Case], make_vocabulary: Callable[[], Vocabulary]) -> tuple[int, int]:
    """How many texts were taken, and how many were stopped: all as they should be."""
    vocabulary, taken, stopped = make_vocabulary(), 0, 0
    for case in cases:
        try:
            reader = Reader(_grammar(case.schema, vocabulary, "flexible", "free"))
        except GrammarError:
            continue
        for is_valid, value in case.instances:
            chance = random.Random(case.name)
            text = chance.choice(list(_texts(value, "flexible", case.schema)))
            if len(text) > LONGEST:
                continue
            for ids in _cuts(vocabulary, text, case.name):
                assert (reader.refused_at(ids) is None) == is_valid, (case.name, text)
                taken, stopped = taken + is_valid, stopped + (not is_valid)
                if is_valid and chance.random() < 0.2:
                    reader.check_rollback(ids, chance)
    return taken, stopped


@pytest.mark.parametrize("name", VOCABULARIES)
def test_some_instances_of_maskbench(shared_data: Data, name: str) -> None:
    cases = aids.maskbench(shared_data("maskbench-dev.jsonl").parent, 40, len(name))
    taken, stopped = _check_maskbench(cases, VOCABULARIES[name])
    assert taken > 60 and stopped > 60


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tekken", pytest.param("sentencepiece", marks=pytest.mark.long)])
def test_many_instances_of_maskbench(shared_data: Data, name: str) -> None:
    """With the vocabulary that more of the other tests use it is long."""
    cases = aids.maskbench(shared_data("maskbench-dev.jsonl").parent, 7, len(name))
    taken, stopped = _check_maskbench(cases, VOCABULARIES[name])
    assert taken > 500 and stopped > 500
