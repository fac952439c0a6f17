"""llguidance as a second opinion: every mask along a document, over tekken's 131 072 tokens.

Where the two differ, each single token must belong to a known class of differences. Evidence decides the class (what
llguidance says about the same text in another spelling), and not the schema. Only three restrictions, which jsg has on
purpose, may forbid a token that llguidance allows; see `Theirs`.
"""

import collections
import enum
import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from bench.constrained import engines
from bench.constrained.cases import CASES, Case
from jsg.constrained.compiler import compile_grammar
from jsg.constrained.grammar import GrammarMasker
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained import aids
from tests.constrained.aids import tekken_encode
from tests.constrained.vocabularies import TEKKEN_EOS, TEKKEN_SPECIAL, bits, tekken, tokenize

pytest.importorskip("llguidance")

type Counts = collections.Counter[object]
LONGEST = 700
"""Bytes of a document of maskbench: the long ones repeat themselves."""


class Ours(enum.Enum):
    """Why we allow what llguidance's mask leaves out."""

    SPELLING = "llguidance takes the token, but its masks hold only the one spelling of forced text that is canonical"
    SIGN = r"U+007F, or a slash that is written \/, both of which are JSON"
    ESCAPE = r"any character of a free string may be written \uXXXX; llguidance has that for control characters only"
    NUMBER = "an exponent, or zero with a sign, of a number that has bounds"
    LATE = "a declared name that was left out of an open object may come later"


class Theirs(enum.Enum):
    """Why llguidance allows what we leave out."""

    LEAP_SECOND = "seconds are at most 59 in our times, since it depends on the zone where 60 is right"
    EXPONENT = "our exponents end at 299, so that no number runs on"
    LINE_BREAK = "ECMA-262's dot matches no carriage return, and no line or paragraph separator"
    NAME = "behind a declared name that may not come, an escape would only be invented to get away from it"


@functools.cache
def _llguidance() -> engines.LlGuidance:
    return engines.LlGuidance(tekken().tokens, range(TEKKEN_SPECIAL), TEKKEN_EOS)


def _ours(case: Case) -> GrammarMasker:
    if case.kind in ("json", "json_schema"):  # llguidance leaves objects open
        text = "true" if case.kind == "json" else case.text
        spec = GrammarSpec("json_schema", text, additional_properties="open")
    else:
        spec = GrammarSpec(case.kind, case.text)  # pyright: ignore[reportArgumentType]
    return compile_grammar(spec, tekken()).new_masker()


class Comparison:
    """Two maskers that read one document."""

    def __init__(self, case: Case):
        self._case = case
        self._ours = _ours(case)
        self._engine = _llguidance()
        self._theirs = self._engine.matcher(self._engine.compile(case))
        self._done = b""

    def run(self) -> Counts:
        """Compares every mask of the document; counts masks, equal ones, and differing tokens by class."""
        counts: Counts = collections.Counter()
        out = np.zeros(tekken().num_words, np.uint32)
        for token in [*tekken_encode(self._case.document), None]:
            if not self._ours.fill_mask(out):
                out[...] = 0xFFFFFFFF
            self._engine.fill(self._theirs)
            theirs = self._engine.mask[0].view(np.uint32)
            counts["masks"] += 1
            counts["equal"] += bool((out == theirs).all())
            counts.update(self._why_theirs(each) for each in bits(theirs & ~out))
            counts.update(self._why_ours(each) for each in bits(out & ~theirs))
            if token is not None:
                assert self._ours.accept(token), (self._case.name, self._done)
                self._engine.accept(self._theirs, token)
                self._done += tekken().tokens[token]
        assert self._ours.is_complete() and self._theirs.is_accepting()
        return counts

    def _takes(self, text: bytes) -> bool:
        """Whether llguidance takes a text next, whatever its masks say: byte by byte."""
        ids = [TEKKEN_SPECIAL + byte for byte in text]
        return self._theirs.validate_tokens(ids) == len(ids)

    def _why_ours(self, token: int) -> Ours:
        text = tekken().tokens[token]
        if self._theirs.validate_tokens([token]) == 1:
            return Ours.SPELLING
        after = self._ours.fork()
        assert after.accept(token)
        whole = text + b"/" if after.forced_bytes()[:1] == b"/" else text
        plain = whole.replace(b"\\/", b"/").replace(b"\x7f", b"x")
        if plain != whole and self._takes(plain):
            return Ours.SIGN
        is_escaped = re.search(rb"(?<!\\)(\\\\)*\\$", self._done) is not None
        if is_escaped and text.startswith(b"/") and self._takes(b'"' + plain[1:]):  # a quote is escaped in its place
            return Ours.SIGN
        if is_escaped and re.fullmatch(rb"u(?!00)[0-9a-fA-F]{1,4}", text) and self._takes(b'"'):
            return Ours.ESCAPE
        if re.fullmatch(rb"[0-9.]*[eE][+-]?[0-9]*", text) and re.search(rb'[^"\w]-?[0-9.]+$', self._done):
            return Ours.NUMBER
        if text in (b"-", b" -") and not any(after.fork().accept(TEKKEN_SPECIAL + digit) for digit in b"123456789"):
            return Ours.NUMBER
        if text.startswith(b'"') and self._is_declared_name():
            return Ours.LATE
        raise AssertionError(f"{self._case.name}: only we allow {text!r} behind {self._done[-80:]!r}")

    def _is_declared_name(self) -> bool:
        """Whether the string that is open is so far a text of the schema."""
        name = re.search(rb'"[^"\\]*$', self._done)
        return name is not None and name[0] + b'"' in self._case.text.encode()

    def _why_theirs(self, token: int) -> Theirs:
        text = tekken().tokens[token]
        if re.search(rb"[0-2][0-9]:[0-5][0-9]:6$", self._done + text):
            return Theirs.LEAP_SECOND
        if re.search(rb"[0-9][eE][+-]?([3-9][0-9]{2}|0[0-9]{2})$", self._done + text):
            return Theirs.EXPONENT
        if re.match(rb"\\r|\\u2028|\\u2029", text) and '"pattern"' in self._case.text:
            return Theirs.LINE_BREAK
        if re.match(rb'\\["\\bfnrtu]', text) and self._is_declared_name():
            return Theirs.NAME
        raise AssertionError(f"{self._case.name}: only llguidance allows {text!r} behind {self._done[-80:]!r}")


@pytest.mark.parametrize("case", [case for case in CASES if case.name != "words"], ids=lambda case: case.name)
def test_masks_along_the_benchmark_documents(case: Case) -> None:
    counts = Comparison(case).run()
    if case.kind in ("regex", "ebnf"):
        assert counts["equal"] == counts["masks"]
    else:
        assert counts["equal"] < counts["masks"] and counts[Ours.SIGN] and counts["masks"] > 5
        assert not counts[Theirs.LEAP_SECOND] and not counts[Theirs.LINE_BREAK]


def test_the_classes_of_characters_in_a_regex_are_pythons() -> None:
    r"""llguidance's \w has combining marks too, and its \s no separators such as U+001C; so here `re` is the oracle."""
    pattern = r"[\w\d\s]*"
    masker = _ours(Case("words", "regex", pattern, ""))
    out = np.zeros(tekken().num_words, np.uint32)
    assert masker.fill_mask(out)
    allowed, whole = bits(out), 0
    for token, text in enumerate(tekken().tokens):
        try:
            is_word = bool(text) and re.fullmatch(pattern, text.decode()) is not None
        except UnicodeDecodeError:
            continue
        whole += 1
        assert (token in allowed) == (is_word or token == TEKKEN_EOS), text
    assert whole > 125_000


def _has_ref_with_siblings(schema: Any) -> bool:
    """Before draft 2019-09 a `$ref` voids what stands beside it; llguidance reads it all the same."""
    if isinstance(schema, dict):
        return (isinstance(schema.get("$ref"), str) and len(schema) > 1) or any(
            map(_has_ref_with_siblings, schema.values())
        )
    return isinstance(schema, list) and any(map(_has_ref_with_siblings, schema))


def _documents(data: pathlib.Path, share: int, start: int) -> Iterator[Case]:
    """Schemas of maskbench, each with the first instance that is valid, short, and in the order of the schema."""
    for case in aids.maskbench(data, share, start):
        machine = None if _has_ref_with_siblings(case.schema) else aids.machine_of(case.schema)
        if machine is None:
            continue
        texts = [json.dumps(value, ensure_ascii=False) for is_valid, value in case.instances if is_valid]
        for text in texts:
            config = machine.advance(machine.start(), text.encode())
            if len(text) <= LONGEST and config is not None and machine.is_accepting(config):
                yield Case(case.name, "json_schema", json.dumps(case.schema), text)
                break


def _compare(cases: Iterator[Case]) -> tuple[int, Counts]:
    total: Counts = collections.Counter()
    compiled = 0
    for case in cases:
        try:
            comparison = Comparison(case)
        except (engines.Unsupported, GrammarError):
            continue
        total.update(comparison.run())
        compiled += 1
    return compiled, total


def test_masks_of_some_schemas_of_maskbench(shared_data: Callable[[str], pathlib.Path]) -> None:
    compiled, total = _compare(_documents(shared_data("maskbench-dev.jsonl").parent, 45, 7))
    assert compiled >= 8 and total["equal"] > 0.2 * total["masks"] and total[Ours.SPELLING] and total[Ours.SIGN]


@pytest.mark.slow
def test_masks_of_many_schemas_of_maskbench(shared_data: Callable[[str], pathlib.Path]) -> None:
    compiled, total = _compare(_documents(shared_data("maskbench-dev.jsonl").parent, 7, 3))
    assert compiled >= 60 and total["masks"] > 4_000 and all(total[why] for why in (*Ours, Theirs.LEAP_SECOND))


def test_a_difference_that_is_not_known_is_found() -> None:
    """The comparison can fail: a grammar that is too loose, and one that is too tight."""
    loose, tight = json.dumps({"enum": ["ab", "ac", "b"]}), json.dumps({"enum": ["ab", "b"]})
    for ours, theirs, who in ((loose, tight, "only we"), (tight, loose, "only llguidance")):
        comparison = Comparison(Case("made up", "json_schema", theirs, '"ab"'))
        comparison._ours = _ours(Case("made up", "json_schema", ours, '"ab"'))
        with pytest.raises(AssertionError, match=who):
            comparison.run()


def test_documents_are_spelled_as_the_tokenizer_does() -> None:
    text = '{"name": "Käthe", "n": [1, 2.5]}'
    ids = tekken_encode(text)
    assert b"".join(tekken().tokens[i] for i in ids).decode() == text
    assert len(ids) <= len(tokenize(tekken(), text.encode())) + 2
