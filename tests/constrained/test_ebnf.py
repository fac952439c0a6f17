"""EBNF: what is read, what is refused with which message, and that rewriting never changes the language."""

import itertools
import random
import re
from pathlib import Path

import pytest

from jsg.constrained.build.builder import build
from jsg.constrained.ebnf.parser import MAX_WORDS, ebnf_grammar, parse
from jsg.constrained.ir import Alt, Call, Chars, Expr, Literal, Repeat, Seq
from jsg.constrained.limits import LIMITS
from jsg.errors import GrammarError
from tests.constrained.texts import accepts, can_begin, machine_of, most_heads
from tests.constrained.work import work

WORK_PER_BYTE = 200
EXAMPLES = Path(__file__).parents[2] / "examples" / "grammars"

READ = [
    ('root ::= "a" | "b"', ["a", "b"], ["", "ab", "c"]),
    ("root ::= 'it''s'", ["its"], ["it's"]),
    (r"root ::= 'it\'s \"'", ["it's \""], []),
    ('root ::= "a"* "b"+ "c"?', ["b", "aabbc", "bc"], ["", "ac", "bcc"]),
    ('root ::= "a"{2} "b"{1,2} "c"{2,} "d"{,1}', ["aabcc", "aabbcccd"], ["abcc", "aabbbcc", "aabc", "aabccdd"]),
    ('root ::= "a"{2,-1}', ["aa", "aaaa"], ["a"]),
    ('root ::= ("a" | "b" ("c" | ) ) "d"', ["ad", "bcd", "bd"], ["d", "acd"]),
    ('root ::= "a" ()', ["a"], [""]),
    ("root ::= [a-c_-]", ["a", "b", "_", "-"], ["d", "ab"]),
    (r"root ::= [^a\]\n]+", ["b", "é😀", "["], ["a", "]", "\n", ""]),
    (r"root ::= [\x41-\x43\u00e9\U0001F600]", ["A", "é", "😀"], ["D", "è"]),
    (r'root ::= "\t\r\n\\\"\x41\u00e9\U0001F600\ud83d\ude00\u{1F600}"', ['\t\r\n\\"Aé😀😀😀'], []),
    ('root ::= "é" .', ["éx", "é\n", "é😀"], ["é", "éxy"]),
    ("root ::= [^]", ["x", "\n"], [""]),
    ("root ::= a-b c_d e.f 9\na-b ::= 'x'\nc_d ::= 'y'\ne.f ::= 'z'\n9 ::= '9'", ["xyz9"], []),
    ("root ::= a . b\na ::= 'x'\nb ::= 'y'", ["x-y"], ["xy"]),
    ("# first\nroot ::=\n  'a' # the a\n  | # or\n  b\nb ::= 'b' #end", ["a", "b"], ["ab"]),
    ("root ::= b\r\nb ::= 'b' 'c'\r\n", ["bc"], []),
    ("root ::= (('a'*)*)* 'b'", ["b", "aab"], ["a"]),
    ("root ::= ('a' | 'b')* 'a' ('a' | 'b'){20}", ["a" * 21, "ba" + "b" * 20], ["b" * 21]),
    ("root ::= ('x'{1000}){1000}", [], ["x" * 1000]),
    ("root ::= '[' (root (',' root)*)? ']'", ["[]", "[[],[[]]]"], ["[", "[,]"]),
    ("unused ::= missing-not 'x'\nmissing-not ::= 'y'\nroot ::= 'a'", ["a"], []),
]


@pytest.mark.parametrize(("text", "good", "bad"), READ)
def test_what_a_grammar_matches(text: str, good: list[str], bad: list[str]) -> None:
    machine = machine_of(ebnf_grammar(text))
    assert [each for each in good if not accepts(machine, each)] == []
    assert [each for each in bad if accepts(machine, each)] == []


REFUSED = [
    ("", "line 1 column 1: a grammar must have a rule 'root', but has no rules"),
    ("a ::= 'x'", "must have a rule 'root', but has a"),
    ("root ::= 'a' b", "line 1 column 14: there is no rule 'b'"),
    ("root ::= 'a'\nroot ::= 'b'", "line 2 column 1: each rule must be defined once"),
    ("root ::= ('a'\n  | 'b'", "line 2 column 8: expected ) for the ( at line 1 column 10, but found the end"),
    ("root ::= 'a' )", "line 1 column 14: expected the name of a rule, but found ')'"),
    ("root ::= 'a\n'", "line 1 column 10: a quoted text must end with '"),
    ("root ::= [a", "line 1 column 10: a class must end with ]"),
    ("root ::= []", "a class must have a character"),
    ("root ::= [b-a]", "line 1 column 11: a range must have its smaller character first"),
    ("root ::= 'a'{3,2}", "line 1 column 13: a repeat must have its smaller number first"),
    ("root ::= 'a'{}", "expected a repeat such as"),
    ("root ::= 'a'{99999999999}", "a repeat may be at most"),
    ("root ::= 'a'{4294967296}", "a repeat may be at most"),
    ("root ::= *", "expected a part of a rule, but found '*'"),
    ("root ::= ::= 'a'", "expected a part of a rule"),
    ("root 'a'", "expected ::= behind the name of a rule"),
    (r"root ::= '\ud800'", "there is no character U+D800"),
    (r"root ::= '\U00110000'", "there is no character U+110000"),
    (r"root ::= '\u12'", r"\u must have 4 hexadecimal digits"),
    (r"root ::= '\q'", "there is no escape"),
    (r"root ::= [\d]", r"the class \d is not supported"),
    ("root ::= 'a' (= 'b')", "look-ahead assertion"),
    ("root ::= (?: 'a')", "groups that begin with"),
    ("root ::= /a+/", "a regular expression between slashes is not supported"),
    ("root ::= <think>", "a token between angle brackets is not supported"),
    ("root ::= 'a';", "a semicolon behind a rule is not supported"),
    ("root = 'a'", "a definition with = is not supported"),
    ("root ::= TagDispatch('a')", "there is no rule 'TagDispatch'; macros of that name are not supported"),
    ("root ::= root", "'root' does nothing but call itself"),
    ("root ::= a\na ::= b\nb ::= a", "does nothing but call itself"),
    ("root ::= 'a' root", "matches no text"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_refusals_say_what_and_where(text: str, message: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(message)):
        build(ebnf_grammar(text))


@pytest.mark.parametrize(
    "text",
    [
        "root ::= " + "(" * 60_000 + "'a'" + ")" * 60_000,
        "root ::= " + "(" * 60_000,
        "root ::= 'a'" + "?" * 30_000,
        "root ::= " + "|" * 25_000,
        "root ::= " + "'a' " * 12_000,
        "root ::= " + "'a' | " * 8_000 + "'b'",
        "root ::= " + "[" * 20_000,
        "root ::= " + "a " * 15_000,
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} 'x'" for i in range(550)) + "\nr550 ::= 'y'",
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)) + "\nr60 ::= 'y'",
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{(i + 1) % 50} 'x' | r{(i + 7) % 50} 'y' | 'z'" for i in range(50)),
        "root ::= " + "(" * 150 + "'a' | 'b'" * 1_000 + "|'c')" * 150,
        "root ::= " + "a? " * 2_000 + "root 'x' | 'y'\na ::= 'z'",
        "root ::= " + "('a'? " * 150 + "root" + ")*" * 150,
    ],
    ids=range(14),
)
def test_the_work_for_a_grammar_is_linear_in_its_length(text: str) -> None:
    """An answer or a refusal, and nothing else."""
    errors: list[str | None] = []
    assert work(lambda: errors.append(_error_of(text))) < WORK_PER_BYTE * len(text) + 300_000
    assert errors[0] is None or len(errors[0]) < 600


@pytest.mark.slow
@pytest.mark.parametrize("size", [LIMITS.text_bytes // 4, MAX_WORDS])
@pytest.mark.parametrize(
    "part",
    ["'a' ", "'a' | ", "a ", "|", "[", "'a'? ", "[ab]{9} ", "('a'|'b') ", "# comment\n", "x\n::='a'\n"],
    ids=range(10),
)
def test_as_much_text_as_is_allowed_ends_soon(part: str, size: int) -> None:
    beginning, end = "root ::= ", "'b'"
    text = beginning + part * ((size - len(beginning) - len(end)) // len(part)) + end
    assert work(lambda: _error_of(text)) < WORK_PER_BYTE * size


def _error_of(text: str) -> str | None:
    """Why a grammar is refused; None where it is not."""
    try:
        build(ebnf_grammar(text))
    except GrammarError as error:
        return str(error)
    return None


LEFT_RECURSIVE = [
    "root ::= root 'a' | 'b'",
    "root ::= root root | 'a'",
    "root ::= root 'a' root | 'b' | 'a' root",
    "root ::= root 'a' | root 'b' 'a' | 'b' | ''",
    "root ::= x 'a' | 'b'\nx ::= root 'b' | 'a'",
    "root ::= x 'a' | 'b'\nx ::= y 'b' | 'a'\ny ::= root | x 'a' | ''",
    "root ::= x root 'a' | 'b'\nx ::= 'a' | ''",
    "root ::= 'a'* root 'b' | 'a'",
    "root ::= ('a' | '') root 'b' | 'b'",
    "root ::= (root 'a')* 'b'",
    "root ::= (root | 'a'){2,3} | 'b'",
    "root ::= root | 'a' | root",
    "root ::= x\nx ::= x ('a' | 'b' x) | 'a' x | 'b'",
    "root ::= root 'a' 'b'* | 'b' | root 'b' root",
]


@pytest.mark.parametrize("text", LEFT_RECURSIVE)
def test_left_recursion_is_removed_and_changes_nothing(text: str) -> None:
    assert _check_language(text, 6)


def test_random_grammars_match_what_they_say() -> None:
    _check_random_grammars(seed=11, count=40, longest=4)


@pytest.mark.slow
def test_many_random_grammars_match_what_they_say() -> None:
    _check_random_grammars(seed=12, count=300, longest=5)


def _check_random_grammars(seed: int, count: int, longest: int) -> None:
    random_ = random.Random(seed)
    num_refused = 0
    num_exact = 0
    for _ in range(count):
        text = _random_grammar(random_)
        error = _error_of(text)
        if error is None:
            num_exact += _check_language(text, longest)
        else:
            assert "cannot be rewritten" in error or "does nothing but call itself" in error, text
            num_refused += 1
    assert num_refused < 0.2 * count and num_exact > 0.6 * count


def _random_grammar(random_: random.Random) -> str:
    names = ["root", "x", "y", "z"][: random_.randint(1, 4)]

    def part(depth: int) -> str:
        kind = random_.random()
        if kind < 0.45:
            return random_.choice(["'a'", "'b'", "'ab'", "[ab]"])
        if kind < 0.75 or depth == 0:
            return random_.choice(names)
        return f"({choice(depth - 1)}){random_.choice(['', '*', '+', '?', '{2}', '{1,2}'])}"

    def choice(depth: int) -> str:
        options = [
            " ".join(part(depth) for _ in range(random_.randint(1, 3))) for _ in range(random_.randint(1, 2 + depth))
        ]
        return " | ".join([*options, *(["''"] if random_.random() < 0.15 else [])])

    return "\n".join(f"{name} ::= {choice(1)} | {random_.choice(['[ab]', chr(39) + 'b' + chr(39)])}" for name in names)


def _check_language(text: str, most: int) -> bool:
    """Compares every text of at most `most` characters with what the grammar as written derives.

    Returns:
        Whether no text had too many ways to read it.
    """
    machine, is_exact = machine_of(ebnf_grammar(text), heads=500), True  # random grammars are as ambiguous as can be
    rules = parse(text, LIMITS)
    expected = _derive(rules, most)
    for length in range(most + 1):
        for chars in itertools.product("ab", repeat=length):
            word = "".join(chars)
            try:
                assert accepts(machine, word) == (word in expected), (text, word)
            except GrammarError:
                is_exact = False
    return is_exact


def _derive(rules: dict[str, Expr], most: int) -> set[str]:
    """The texts of at most `most` characters that `root` derives: the least fixpoint, by trying all."""
    found: dict[str, set[str]] = {name: set() for name in rules}

    def join(left: set[str], right: set[str]) -> set[str]:
        return {a + b for a in left for b in right if len(a) + len(b) <= most}

    def texts(expr: Expr) -> set[str]:
        match expr:
            case Literal(value):
                return {value.decode()}
            case Chars(ranges):
                return {char for char in "ab" if any(low <= ord(char) <= high for low, high in ranges)}
            case Call(rule):
                return found[rule]
            case Alt(options):
                return set().union(*map(texts, options))
            case Seq(parts):
                result = {""}
                for part in parts:
                    result = join(result, texts(part))
                return result
            case Repeat(item, least, most_items):
                items = texts(item)
                level = {""}
                result = set(level) if least == 0 else set()
                for count in range(1, (most + least + 1 if most_items is None else most_items) + 1):
                    level = join(level, items)
                    if count >= least:
                        result |= level
                return result
            case _:
                raise AssertionError(expr)

    while True:
        before = sum(map(len, found.values()))
        for name, expr in rules.items():
            found[name] = found[name] | texts(expr)
        if sum(map(len, found.values())) == before:
            return found["root"]


def test_operators_at_one_level_do_not_multiply_the_ways_to_read() -> None:
    text = 'root ::= e\ne ::= e "+" e | e "*" e | "-" e | "(" e ")" | [0-9]+'
    assert most_heads(machine_of(ebnf_grammar(text)), "1+-2*(3+4*5)+-6*7+8+9*10") == 1


def test_rules_with_one_beginning_are_read_as_one() -> None:
    text = """root ::= (statement ";")*
statement ::= assignment | call | "if " expression
assignment ::= name "=" expression
call ::= name "(" expression ")"
expression ::= call | name | [0-9]+ | "(" statement ")"
name ::= [a-z]+"""
    assert most_heads(machine_of(ebnf_grammar(text)), "abc=de;fgh(ij(kl));if mn;(a=1)"[:23]) == 1


EXAMPLE_TEXTS: dict[str, tuple[list[str], list[str], int]] = {
    "arithmetic": (
        ["1", "1 + 2 * (x - 3.5)^2 / -y", "f(x,1)", "f()", "max( a, b )*2", "2^3^4", "--1", "1e-5"],
        ["1 +", "()", "1  + 2", "01", "f(,)", "", "1 2"],
        1,
    ),
    "sql_select": (
        [
            "SELECT * FROM t;",
            "SELECT name, COUNT(*) AS n FROM users AS u LEFT JOIN orders ON u.id = orders.user_id WHERE age >= 18 "
            "GROUP BY name HAVING COUNT(*) > 1;",
            "SELECT a FROM t WHERE (a = 1 OR NOT b IS NULL) AND c IN (SELECT d FROM e) ORDER BY a DESC LIMIT 10 "
            "OFFSET 5;",
            "SELECT DISTINCT a + 1 - b FROM (SELECT c FROM d) AS t WHERE s LIKE 'it''s' AND x BETWEEN 1 AND 2;",
        ],
        ["SELECT FROM t;", "SELECT * FROM t", "DROP TABLE t;", "SELECT a FROM t WHERE ;", "SELECT a FROM t; SELECT"],
        3,
    ),
    "function_call": (
        ["f()", 'book("ZRH", "L\\"S", n=2, o={"m": ["v"], "w": True})', "f(1)\ng(a=None)", "f(-0.5, [])"],
        ["f(", "f(a=1, 2)", "f() ", "F()", "f(01)"],
        1,
    ),
    "xml_tags": (
        [
            '<doc lang="en"><title>Tea &amp; cake</title><p>One <b>two</b></p><br/></doc>',
            '<doc><list><item>a<br/><list><item>b</item></list></item></list><p>é<a href="x?y=1">z</a></p></doc>',
        ],
        ["<doc></doc>", "<doc><p>a</doc></p>", "<doc><p>a & b</p></doc>", "<doc><br/></doc> "],
        3,
    ),
    "json": (
        [
            "{}",
            '{"a": [1, -2.5e3, true, null, "x\\u00e9\\n"]}',
            '"é"',
            "[ ]",
            '{\n  "a": {\n    "b": 1\n  }\n}',
            "-0.1E+5",
        ],
        ["{", '{"a"}', "01", "[1,]", "{'a':1}", "{  }", '"\n"', "tru", ""],
        1,
    ),
}


@pytest.mark.parametrize("name", sorted(EXAMPLE_TEXTS))
def test_example_grammars(name: str) -> None:
    good, bad, heads = EXAMPLE_TEXTS[name]
    machine = machine_of(ebnf_grammar((EXAMPLES / f"{name}.gbnf").read_text()))
    assert [text for text in good if not accepts(machine, text)] == []
    assert [text for text in bad if accepts(machine, text)] == []
    assert max(most_heads(machine, text) for text in good) <= heads


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.gbnf")} == set(EXAMPLE_TEXTS)


def test_a_position_in_the_middle_can_begin_a_text() -> None:
    machine = machine_of(ebnf_grammar("root ::= '{' [a-z]* '}'"))
    assert can_begin(machine, "{ab") and not can_begin(machine, "{A") and not accepts(machine, "{ab")
