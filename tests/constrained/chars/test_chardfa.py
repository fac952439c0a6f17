"""Automata over characters: against `re` on all short texts, their laws, and their fuel."""

import itertools
import random
import re

import pytest

from jsg.constrained.chars import charset
from jsg.constrained.chars.chardfa import CharDfa, as_repeat, fit_length, fixed_length
from jsg.constrained.ir import EMPTY, NEVER, Alt, Automaton, Bag, Chars, Literal, Repeat, Seq, Words, seq
from jsg.constrained.limits import Limits
from jsg.errors import GrammarError
from tests.constrained.work import work

TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("abc", repeat=length)]
DOT = Chars(charset.complement(charset.of("\n")))
A = Chars(charset.of("a"))


def random_expr(rng, depth):
    match rng.randrange(7 if depth else 2):
        case 0:
            return Chars(charset.of(rng.sample("abc", rng.randrange(1, 3))))
        case 1:
            return Literal("".join(rng.choices("abc", k=rng.randrange(1, 3))).encode())
        case 2:
            return Seq(tuple(random_expr(rng, depth - 1) for _ in range(rng.randrange(4))))
        case 3:
            return Alt(tuple(random_expr(rng, depth - 1) for _ in range(rng.randrange(1, 4))))
        case 4:
            return Words(tuple(sorted({"".join(rng.choices("abc", k=rng.randrange(1, 4))).encode() for _ in range(3)})))
    least = rng.randrange(3)
    separator = EMPTY if rng.random() < 0.5 else random_expr(rng, 0)
    return Repeat(random_expr(rng, depth - 1), least, rng.choice([None, least, least + 1, least + 2]), separator)


def pattern(expr):
    """An expression over characters as a pattern of Python's `re`."""
    match expr:
        case Chars(ranges):
            return "[" + "".join(f"{chr(low)}-{chr(high)}" for low, high in ranges) + "]"
        case Literal(value):
            return value.decode()
        case Words(words):
            return "(?:" + "|".join(word.decode() for word in words) + ")"
        case Seq(parts):
            return "".join(map(pattern, parts))
        case Alt(options):
            return "(?:" + "|".join(map(pattern, options)) + ")"
        case Repeat(item, least, most, Seq(())):
            return f"(?:{pattern(item)}){{{least},{'' if most is None else most}}}"
        case Repeat(item, least, 0):
            return ""
        case Repeat(item, least, most, separator):
            count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
            items = f"(?:{pattern(item)}(?:{pattern(separator)}{pattern(item)}){count})"
            return items if least else items + "?"
    raise TypeError(expr)


def matched(dfa):
    """The short texts that an automaton matches."""
    letters = {c: next((i for i, ranges in enumerate(dfa.classes) if charset.contains(ranges, c)), None) for c in "abc"}
    found, level = set(), [("", 0)]
    for _ in range(6):
        found.update(text for text, state in level if state in dfa.accepting)
        level = [
            (text + c, dfa.rows[state][letters[c]])
            for text, state in level
            for c in "abc"
            if letters[c] is not None and dfa.rows[state][letters[c]] >= 0
        ]
    return found


def test_automata_match_what_re_matches_and_combine_as_sets():
    for seed in range(150):
        rng = random.Random(seed)
        one, other = random_expr(rng, 3), random_expr(rng, 2)
        a, b = ({text for text in TEXTS if re.fullmatch(pattern(expr), text)} for expr in (one, other))
        left, right = CharDfa.of(one), CharDfa.of(other)
        assert matched(left) == a and matched(left.minimised()) == a, seed
        assert matched(left.intersect(right)) == a & b and matched(left.union(right)) == a | b, seed
        assert matched(left.difference(right)) == a - b and matched(left.complement()) == set(TEXTS) - a, seed
        assert matched(CharDfa.of(left.to_expr())) == a, seed
        assert len(left.complement().complement().minimised().rows) == len(left.minimised().rows), seed
        assert left.difference(left).is_empty(), seed
        lengths = left.lengths()
        if a:
            assert lengths is not None and lengths[0] == min(map(len, a)), seed
            if lengths[1] is not None and lengths[1] <= 5:
                assert lengths[1] == max(map(len, a)), seed
        for least, most in ((0, 2), (2, 4), (3, None)):
            fitted = fit_length(one, least, most)
            if fitted is not None:
                upper = 99 if most is None else most
                assert matched(CharDfa.of(fitted)) == {text for text in a if least <= len(text) <= upper}, seed


def test_accepts_characters_of_all_planes():
    dfa = CharDfa.of(Seq((Repeat(Chars(charset.general_category("L")), 1, None), Literal("😀!".encode()))))
    assert dfa.accepts("éж中😀!") and dfa.accepts("a😀!")
    assert not dfa.accepts("😀!") and not dfa.accepts("a😁!") and not dfa.accepts("") and not dfa.accepts("a1😀!")


def test_words_and_lengths():
    words = CharDfa.words(["car", "cart", "dog", ""])
    assert [text for text in ("", "car", "cart", "ca", "dogs", "dog") if words.accepts(text)] == [
        "",
        "car",
        "cart",
        "dog",
    ]
    assert words.lengths() == (0, 4)
    assert CharDfa.words([]).is_empty() and CharDfa.words([]).to_expr() == NEVER
    assert CharDfa.words([""]).to_expr() == EMPTY
    within = CharDfa.length(2, 3)
    assert [within.accepts("é" * count) for count in range(5)] == [False, False, True, True, False]
    beyond = CharDfa.length(2, None)
    assert [beyond.accepts("é" * count) for count in range(5)] == [False, False, True, True, True]
    assert beyond.lengths() == (2, None) and CharDfa.words([]).lengths() is None


def test_minimised_merges_what_is_equivalent():
    assert len(CharDfa.words([f"word{i}" for i in range(1000)]).minimised().rows) <= 12
    assert len(CharDfa.of(Seq((Repeat(A, 0, None), Repeat(A, 0, None)))).minimised().rows) == 1


def test_of_texts_that_end_minimised_is_as_small_as_can_be():
    """As many states as there are different sets of ends, among the beginnings of texts (Myhill and Nerode)."""
    for seed in range(60):
        dfa = CharDfa.of(random_expr(random.Random(seed), 3)).intersect(CharDfa.length(0, 4)).minimised()
        texts = matched(dfa)
        beginnings = {text[:i] for text in texts for i in range(len(text) + 1)}
        ends = {frozenset(text[len(begin) :] for text in texts if text.startswith(begin)) for begin in beginnings}
        assert len(dfa.rows) == max(len(ends), 1), seed


def test_any_name_but_a_few_is_small():
    names = CharDfa.words(["id", "name", "size"]).complement()
    assert len(names.minimised().rows) <= 10
    assert names.accepts("names") and names.accepts("") and not names.accepts("id")
    assert isinstance(names.to_expr(), Automaton)


def test_runs_of_one_set_stay_counts():
    assert as_repeat(A) == (A.ranges, 1, 1) and as_repeat(Seq((A, Repeat(A, 2, None)))) == (A.ranges, 3, None)
    assert as_repeat(Seq((A, Repeat(A, 2, 5)))) == (A.ranges, 3, 6)
    assert as_repeat(Seq((A, DOT))) is None and as_repeat(Alt((A, DOT))) is None and as_repeat(EMPTY) is None
    assert fit_length(Repeat(A, 1, None), 0, 100_000) == Repeat(A, 1, 100_000)
    host = Seq((A, Repeat(DOT, 0, None), Literal(b"..")))
    assert fit_length(host, 0, 253) == Seq((A, Repeat(DOT, 0, 250), Literal(b"..")))
    assert fit_length(host, 0, 2) == NEVER
    assert fit_length(Seq((Repeat(A, 0, None), DOT, Repeat(A, 0, None))), 0, 9) is None
    assert fixed_length(Seq((A, Literal("é".encode()), Repeat(DOT, 3, 3), Words((b"ab", b"cd"))))) == 7
    assert fixed_length(Alt((A, EMPTY))) is None


@pytest.mark.parametrize(
    "expr",
    [
        seq(Repeat(DOT, 0, None), A, Repeat(DOT, 20, 20)),
        Repeat(Repeat(A, 1000, 1000), 1000, 1000),
        seq(Repeat(DOT, 0, 9999), Repeat(DOT, 0, 9999)),
        Repeat(A, 0, 1_000_000_000),
    ],
)
def test_what_is_too_large_is_refused_soon(expr):
    def refuse():
        with pytest.raises(GrammarError, match="100 states of the pattern"):
            CharDfa.of(expr, Limits(char_states=100))

    assert work(refuse) < 20_000
    with pytest.raises(GrammarError, match="states of the pattern"):
        CharDfa.of(expr)


def test_products_have_fuel():
    limits = Limits(char_states=100)
    left, right = CharDfa.length(60, 60, limits), CharDfa.of(Repeat(Literal(b"abc"), 0, None), limits)
    assert len(left.intersect(right).rows) == 61
    cycle = CharDfa.of(Repeat(Repeat(A, 11, 11), 0, None), limits)
    with pytest.raises(GrammarError, match="states of the pattern"):
        cycle.intersect(CharDfa.of(Repeat(Repeat(A, 13, 13), 0, None), limits))
    with pytest.raises(GrammarError, match="states of the pattern"):
        CharDfa.length(0, 101, limits)
    with pytest.raises(GrammarError, match="states of the pattern"):
        CharDfa.words(["a" * 101], limits)


def test_what_has_no_automaton_is_named():
    with pytest.raises(GrammarError, match="Bag"):
        CharDfa.of(Bag((), EMPTY))
