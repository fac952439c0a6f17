"""Regular expressions against Python's `re`, on texts that the automaton makes and on texts near them."""

import functools
import random
import re

import pytest

from jsg.constrained.chars import charset
from jsg.constrained.chars.chardfa import CharDfa
from jsg.constrained.ir import NEVER, Alt, Automaton, Chars, Expr, Repeat, Seq
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.regex import parse, reader
from jsg.constrained.regex.parse import parse_regex, regex_grammar
from jsg.errors import GrammarError
from tests.constrained.chars.test_lower import byte_pattern
from tests.constrained.work import work

ODD = [
    "",
    "\n",
    "\r",
    "\u2028",
    "\u2029",
    " ",
    "\xa0",
    "\ufeff",
    "é",
    "\N{LATIN SMALL LETTER LONG S}",
    "K",
    "٣",
    "😀",
    "\x85",
    "_",
    "]",
    "{",
    "\\",
    "^",
    "-",
]


@functools.cache
def automaton(pattern, search):
    return CharDfa.of(parse_regex(pattern, search=search))


def samples(dfa, seed, count=25):
    """Texts that the automaton matches, by walks through it, and each with a character changed, left out or put in."""
    rng = random.Random(seed)
    for _ in range(count):
        text, state = "", 0
        while not (state in dfa.accepting and rng.random() < 0.2) and len(text) < 40:
            edges = [(i, target) for i, target in enumerate(dfa.rows[state]) if target >= 0]
            if not edges:
                break
            i, state = rng.choice(edges)
            low, high = rng.choice(dfa.classes[i])
            text += chr(rng.choice([low, high, rng.randint(low, high), min(high, max(low, 0x61))]))
        yield text
        at = rng.randrange(len(text) + 1)
        other = rng.choice([*ODD, *"ab0Z"])
        yield from (text[:at] + other + text[at:], text[:at] + text[at + 1 :], text[:at] + other + text[at + 1 :])
    yield from ODD


PLAIN = [
    "",
    "abc",
    "a|b|",
    "(a|bc)*d?",
    "(?:ab){2,3}c{2}d{0,}e{1,}",
    "a*?b+?c??d{1,2}?",
    "(?P<year>[0-9]{4})-(?P<month>[0-9]{2})",
    "[a-z]+@[a-z]+[.](com|org)",
    "[^a-c]",
    r"[\]\\^-]+",
    "[a-]b[-a]",
    "[é-ü]ж*",
    "x{a}",
    "a{,b",
    "}]",
    r"\x41\u0042\t\n\.\-\/",
    "((a|b)(c|d)){1,2}(|e)",
    "((((a))))",
    "(a{2}){3}(b{0,1}){0,4}(c{2,}){0,2}((d+)*)?",
    r"(((25[0-5]|2[0-4]\d|[01]?\d?\d)\.){3})(25[0-5]|2[0-4]\d|[01]?\d?\d)",
]


def test_full_match_is_that_of_re():
    for pattern in [*PLAIN, *(p for p in (r"\w+\W", r"\d\D", r"\s*\S", ".+", "(?s:.)+", "[\\w.-]+", r"[^\s\d]"))]:
        dfa = automaton(pattern, search=False)
        compiled = re.compile(pattern)
        for text in samples(dfa, pattern):
            assert dfa.accepts(text) == bool(compiled.fullmatch(text)), (pattern, text)


# What differs between the dialects, as Python's `re` says it.
TRANSLATED = {
    ".": r"[^\n\r\u2028\u2029]",
    r"\d": "[0-9]",
    r"\w": "[A-Za-z0-9_]",
    r"\s": r"[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
    "$": r"\Z",
}


def as_python(pattern):
    return re.sub(r"\\[dws]|[.$]", lambda found: TRANSLATED[found[0]], pattern)


def test_search_is_that_of_re_with_anchors_anywhere():
    for pattern in [
        "",
        "abc",
        "^abc",
        "abc$",
        "^abc$",
        "^a|b$",
        "^(a|b)$",
        "(^a|b)c",
        "a(b$|c)",
        "(^|x)a($|y)",
        "^^a$$",
        "(^a)?b",
        "(^a|b)*c",
        "(a|^)+b",
        "(a$|b){2}",
        "(^a|b|c$){1,3}",
        "(^a|b|c$){2}",
        "(^|a|b$){2,3}",
        "(^a$|b)",
        "(^a$|){2}b?",
        "(^x|y$|z?){2,}$",
        "((^|,)[a-c]+)*$",
        "^(?:|a)$",
        "^.*$",
        "^.{2,4}$",
        r"^\d{3}-\w+\s?$",
        "^$",
        "$^",
        "a?^b",
        "b$a?",
        "(?:^a*)*",
        "[a-z]+$",
        "^[a-z]+",
        "x*",
        "x+y*",
        ".foo.",
    ]:
        dfa = automaton(pattern, search=True)
        compiled = re.compile(as_python(pattern))
        for text in [*samples(dfa, pattern), *("".join(t) for t in words("abcx", 4))]:
            assert dfa.accepts(text) == bool(compiled.search(text)), (pattern, text)


def words(letters, length):
    texts = [""]
    for _ in range(length):
        texts += [text + letter for text in texts for letter in letters]
    return sorted(set(texts))


def check_random_anchored_pattern(seed, longest):
    rng = random.Random(seed)

    def piece(depth):
        kind = rng.randrange(6 if depth else 3)
        if kind < 2:
            return rng.choice("ab")
        if kind == 2:
            return rng.choice(["^", "$", "a", "b", ""])
        inner = "".join(piece(depth - 1) for _ in range(rng.randrange(1, 4)))
        if kind == 3:
            return f"(?:{inner}|{piece(depth - 1)})"
        return f"(?:{inner})" + rng.choice(["*", "+", "?", "{2}", "{2,3}", "{0,2}", "{3,}"])

    pattern = "".join(piece(3) for _ in range(3))
    searched, whole = automaton(pattern, search=True), automaton(pattern, search=False)
    for text in words("ab", longest):
        # `fullmatch` of a dollar before a last line break is the one difference, and no text here has a line break.
        assert searched.accepts(text) == bool(re.search(pattern, text)), (pattern, text)
        assert whole.accepts(text) == bool(re.fullmatch(pattern, text)), (pattern, text)


def test_random_anchored_patterns_are_those_of_re():
    for seed in range(60):
        check_random_anchored_pattern(seed, 4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60, 180))
def test_many_random_anchored_patterns_are_those_of_re(seed):
    check_random_anchored_pattern(seed, 6)


@pytest.mark.parametrize("pattern", ["a^", "$a", "a^b", "x(^y)", "(a$)b", "[]", "a[]b", r"\ud800", r"[\ud800-\udfff]"])
def test_what_can_never_match_is_never(pattern):
    assert parse_regex(pattern, search=True) == NEVER


def test_ecma_constructs():
    for pattern, accepted, refused in [
        (r"^\u{1F600}\ud83d\ude00$", ["😀😀"], ["😀"]),
        (r"^[\ud83d\ude00-\u{1F64F}]$", ["😀", "🙏"], ["\ufffd", "a"]),
        (r"^\cJ\0\x7e$", ["\n\0~"], ["J0~"]),
        (r"^\p{Lu}\P{L}$", ["Ж1", "A "], ["ж1", "AB"]),
        (r"^[\p{Letter}\p{Nd}_]+$", ["жA5_", "٣"], ["-", ""]),
        (r"^[^\p{L}]$", ["1"], ["x"]),
        ("^[^]$", ["\n", "😀"], ["", "ab"]),
        ("^[^]]$", ["a]", "]]"], ["a", "]"]),
        (r"^[\b]$", ["\b"], ["b"]),
        (r"^[\w-.]$", ["-", ".", "a"], [",", "é"]),
        (r"^\-\_\@\"\'\:\#$", ["-_@\"':#"], [""]),
        ("^(?<first>a)(?<last_1>b)$", ["ab"], ["a"]),
        (r"^\w$", ["a", "_", "5"], ["é", "٣"]),
        (r"^\d$", ["5"], ["٣"]),
        (r"^\s$", [" ", "\ufeff", "\u2028", "\xa0"], ["\x1c", "\x85", "a"]),
        (r"^\S$", ["\x1c", "a"], ["\ufeff"]),
        ("^.$", ["é", "\x85"], ["\r", "\u2028"]),
        ("^(?i:straße|k)x$", ["STRAßEx", "STRAẞEx", "\N{KELVIN SIGN}x"], ["strassex", "KX"]),
        ("^(?i:[a-c]+)[^a]$", ["aBCd", "AA"], ["aBCa"]),
        ("^(?i:a(?-i:b))$", ["Ab", "ab"], ["AB"]),
        ("^(?s:.)$", ["\n"], [""]),
        ("^[一-鿿]{1,5}$", ["中文"], ["中文中文中文", "a"]),
        ("^a$", ["a"], ["a\n"]),
    ]:
        dfa = automaton(pattern, search=True)
        assert [text for text in accepted if not dfa.accepts(text)] == [], pattern
        assert [text for text in refused if dfa.accepts(text)] == [], pattern


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        (r"\Aab\Z", ["ab"], ["ab\n"]),
        ("^a$", ["a"], ["a\n", "ba"]),
        (r"\w\d\s", ["é٣\x1c"], ["é٣\ufeff"]),
        (".", ["\r", "\u2028"], ["\n"]),
        ("(?i)ab", ["AB", "aB"], ["a"]),
        ("(?is)a.", ["A\n"], ["b\n"]),
        ("(?m)a", ["a"], ["a\n"]),
        ("[]a]+", ["]a"], ["b"]),
        ("[^]a]", ["b"], ["]", "a"]),
        (r"\a\07\101\0", ["\a\7A\0"], ["a"]),
        (r"\U0001F600\u{41}\p{Lu}", ["😀AЖ"], [""]),
        ("a(?#a comment)b", ["ab"], ["a"]),
        ("a{,2}", ["", "aa"], ["aaa"]),
    ],
)
def test_python_constructs(pattern, accepted, refused):
    dfa = automaton(pattern, search=False)
    assert [text for text in accepted if not dfa.accepts(text)] == []
    assert [text for text in refused if dfa.accepts(text)] == []


@pytest.mark.parametrize(
    ("pattern", "what", "position"),
    [
        ("a(?=b)", "look-ahead", 1),
        ("a(?!b)", "look-ahead", 1),
        ("(?<=a)b", "look-behind", 0),
        ("(?<!a)b", "look-behind", 0),
        (r"(a)\1", "back-references", 3),
        (r"(?<n>a)\k<n>", "back-references", 7),
        ("(?P<n>a)(?P=n)", "back-references", 8),
        (r"ab\b", r"word boundaries \(\\b\)", 2),
        (r"\Ba", r"word boundaries \(\\B\)", 0),
        ("(?>a)", "atomic groups", 0),
        ("xa++", "possessive quantifiers", 2),
        ("a{2}+", "possessive quantifiers", 1),
        ("(?(1)a|b)", "conditionals", 0),
        ("(?x:a)", "the flag x", 0),
        ("(?i)a", "flags without a group", 0),
        ("(?|a)", "branch-reset", 0),
        ("(?P>n)", "recursion", 0),
        ("(*FAIL)", "verbs", 0),
        ("(?<1a>b)", "a group's name", 0),
        ("(?^a)", "a group must open", 0),
        ("(?m:^a)", "anchors under the flag m", 4),
        (r"\p{Script=Greek}", "property 'Script=Greek'", 0),
        (r"x\p{Foo}", "property 'Foo'", 1),
        (r"\pL", "a property is written", 0),
        (r"\q", r"escape \\q", 0),
        (r"\Aa", r"escape \\A", 0),
        (r"\N{DASH}", r"escape \\N", 0),
        (r"\x4", "2 hexadecimal digits", 0),
        (r"\u12g4", "4 hexadecimal digits", 0),
        (r"\u{110000}", "at most 10FFFF", 0),
        (r"\u{}", "hexadecimal code point", 0),
        (r"\c1", r"\\c needs a letter", 0),
        (r"\01", "octal escapes", 0),
        ("a\\", "a backslash stands at the end", 1),
        ("a{2,1}", "least count of a quantifier is above", 1),
        ("a{,5}", "without its least count", 1),
        ("a{3000000000}", "counts to at most", 1),
        ("*a", "nothing to repeat", 0),
        ("a|+", "nothing to repeat", 2),
        ("a**", "nothing to repeat", 2),
        ("a{2}{3}", "nothing to repeat", 4),
        ("(a", "is not closed", 0),
        ("a)", "closes nothing", 1),
        ("x[a", "class has no end", 1),
        ("[z-a]", "ends before it begins", 1),
        ("[[:alpha:]]", r"\[:alpha:\]", 1),
        ("[a-z&&[^b]]", "operations on sets", 4),
    ],
)
def test_what_is_not_supported_is_named_with_its_position(pattern, what, position):
    with pytest.raises(GrammarError, match=rf"^regular expression: .*{what}.*at position {position} ") as caught:
        parse_regex(pattern, search=True, param="pattern")
    assert caught.value.param == "pattern"


@pytest.mark.parametrize("pattern", [r"[\w-a]", "(?a)b", "b(?i)a", r"(?#a", r"\8"])
def test_what_python_refuses_is_refused_in_its_dialect(pattern):
    with pytest.raises(GrammarError):
        parse_regex(pattern, search=False)


def test_counts_are_kept_and_merged():
    a = Chars(charset.of("a"))
    assert parse_regex("^[a-z]{1,5}$", search=True) == Repeat(Chars(((0x61, 0x7A),)), 1, 5)
    assert parse_regex("a{0,1000000000}", search=False) == Repeat(a, 0, 1_000_000_000)
    assert parse_regex("(a{1000}){1000}", search=False) == Repeat(a, 1_000_000, 1_000_000)
    assert parse_regex("(a{2}){3,4}", search=False) == Repeat(Repeat(a, 2, 2), 3, 4)
    assert parse_regex("(a{2,3}){2,4}", search=False) == Repeat(a, 4, 12)
    assert parse_regex("((a?)*)+", search=False) == Repeat(a, 0, None)
    huge = parse_regex("(a{1000000000}){1000000000}", search=False)
    assert huge == Repeat(Repeat(a, 10**9, 10**9), 10**9, 10**9)


def test_single_characters_become_one_set():
    assert parse_regex("a|b|[c-e]|f", search=False) == Chars(((0x61, 0x66),))


def byte_sets_only(expr: Expr) -> bool:
    match expr:
        case Chars():
            return False
        case Seq(inner) | Alt(inner):
            return all(map(byte_sets_only, inner))
        case Repeat(item):
            return byte_sets_only(item)
        case Automaton():
            return False
    return True


@pytest.mark.parametrize(
    "pattern", [r"[\w.]+@é{2,3}😀?", "(?:ab|cd|日本)+", r"\p{Lu}[^a]{0,3}", "Zeile|Spalte|Seite", ""]
)
def test_the_grammar_of_a_regex_is_its_utf8(pattern):
    grammar = regex_grammar(pattern)
    (expr,) = grammar.rules.values()
    assert byte_sets_only(expr)
    dfa = automaton(pattern, search=False)
    compiled = re.compile(byte_pattern(expr), re.DOTALL)
    for text in samples(dfa, pattern):
        assert bool(compiled.fullmatch(text.encode())) == dfa.accepts(text), text


def test_a_regex_that_matches_nothing_is_refused():
    with pytest.raises(GrammarError, match="matches no text") as caught:
        regex_grammar("a^b")
    assert caught.value.param == "regex"


PATHOLOGIES = {
    "60 000 parentheses": ("(" * 60_000 + ")" * 60_000, "nesting"),
    "60 000 open parentheses": ("(" * 60_000, "nesting"),
    "nested quantifiers": ("x" + "(" * 150 + "a" + "b)*" * 150 + "y", "nesting"),
    "optional letters": ("a?" * 1000 + "a" * 1000, None),
    "a letter 20 before the end": ("(a|b)*a(a|b){20}", None),
    "million": ("(x{1000}){1000}", None),
    "Chinese": ("[一-鿿]{1,5}", None),
    "a long text": ("a" * 30_000, None),
    "many words": ("|".join(f"word{i}" for i in range(2_000)), None),
    "too many quantifiers": ("a*" * 15_000, "quantifiers"),
    "too many anchors": ("^" * 15_000, "anchors"),
    "many anchored choices": ("(^|a)" * 1_000, None),
    "nested anchored loops": ("(" * 60 + "^a" + "|b)*" * 60, None),
    "many letters' classes": (r"[\p{L}a]" * 1_000, "intervals"),
    "open brackets": ("[" * 50_000, "no end"),
    "braces": ("{" * 20_000, None),
    "too long": ("a" * (LIMITS.text_bytes + 1), "bytes"),
    "long counts": ("a{" + "9" * 100_000 + "}", "counts to at most"),
}


@pytest.mark.parametrize("name", PATHOLOGIES)
@pytest.mark.parametrize("search", [True, False])
def test_the_work_for_a_pattern_is_linear_in_its_length(monkeypatch, name, search):
    monkeypatch.setattr(parse, "_MAX_SYMBOLS", 10_000)
    monkeypatch.setattr(reader, "_CLASS_WORK", 200_000)
    pattern, refusal = PATHOLOGIES[name]
    refused = []

    def answer():
        try:
            parse_regex(pattern, search=search)
        except GrammarError as error:
            refused.append(str(error))

    assert work(answer) < 100 * len(pattern) + 2_000
    assert bool(refused) == (refusal is not None)
    assert all(refusal in message for message in refused)


def test_as_many_quantifiers_anchors_and_intervals_as_the_limits_say():
    for pattern, refusal in (
        ("a*" * 60_000, "quantifiers"),
        ("^" * 110_000, "anchors"),
        (r"\p{L}" * 4_000, "intervals"),
    ):
        with pytest.raises(GrammarError, match=refusal):
            parse_regex(pattern, search=True)


def test_nesting_is_limited_where_it_is_set():
    limits = Limits(nesting=3)
    parse_regex("(((a)))", search=False, limits=limits)
    with pytest.raises(GrammarError, match="3 levels of nesting"):
        parse_regex("((((a))))", search=False, limits=limits)
