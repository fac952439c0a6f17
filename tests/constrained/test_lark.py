"""Lark grammars and regular expressions of custom tools → patterns of JSON Schema."""

import re

import pytest

from jsg.constrained.ebnf.lark import MAX_CHARS, lark_pattern, regex_pattern
from jsg.errors import GrammarError

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF
%import common.LF
"""
LISTS = r"""
// a comment
?start.2: item ("," _WS? item)~0..2 | empty   # another
item: NAME | SIGNED_NUMBER | "true"i | "x".."z" | [ "<" /[\/">]\/(?P<in>a|b)/i ">" ]
empty: "none"
NAME: CNAME "!"
_WS: /[ \t]/+
%import common (CNAME, SIGNED_NUMBER)
"""
CALC = """
start: expr
expr: term (SP ADD SP term)* -> add
    | term
term: INT
SP: " "
ADD: "+"
%import common.INT
"""


def matches(pattern: str, text: str) -> bool:
    return re.fullmatch(pattern.removeprefix("^").removesuffix("$"), text) is not None


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (
            PATCH,
            [
                "*** Begin Patch\n*** Add File: a.py\n+x = 1\n*** End Patch\n",
                "*** Begin Patch\n*** Delete File: a\n*** End Patch",
            ],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: \n+x\n*** End Patch"],
        ),
        (LISTS, ["a_1!", "TRUE, -1.5e3,y", "none", "", "<//B>", ",,"], ["a", "w", "none,none", "1,1,1,1", "<//c>"]),
        (CALC, ["1", "1 + 22 + 3"], ["", "1+2", "1 + "]),
        ('start: "a\\n\\"\\u00e4\\\\" /[^a]./s', ['a\n"ä\\b\n'], ['a\n"ä\\a\n', 'a\\n"ä\\bb']),
    ],
)
def test_the_texts_of_a_grammar(grammar, good, bad):
    pattern = lark_pattern(grammar)
    assert [text for text in good if not matches(pattern, text)] == []
    assert [text for text in bad if matches(pattern, text)] == []


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"^The (?P<month>May|June) \d{1,2}$", ["The May 5"], ["The May", "x The May 5"]),
        (r"cost\$", ["cost$"], ["cost"]),
        (r"(?i)a.b", ["AxB"], ["a\nb"]),
        (r"(?s)a.b", ["a\nb"], ["AxB"]),
        (r"a/b|c", ["a/b", "c"], ["a/c"]),
    ],
)
def test_regular_expressions(regex, good, bad):
    pattern = regex_pattern(regex)
    assert [text for text in good if not matches(pattern, text)] == []
    assert [text for text in bad if matches(pattern, text)] == []


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('start: "(" start ")" | "x"', "calls itself"),
        ('start: a\na: b\nb: a "x"', "calls itself"),
        ("start: a", "no rule a"),
        ('rule: "a"', "no rule start"),
        ('start: "a"\n%ignore " "', "%ignore"),
        ("%import common.SQL_COMMENT\nstart: SQL_COMMENT", "SQL_COMMENT"),
        ('start: x{"a"}\nx: "b"', "not supported"),
        ('start: ("a"', "not closed"),
        ('start: ["a")', "not closed"),
        ("start: )", "cannot be"),
        ('start: "b".."a"', "range"),
        ('start: "a".. "', "not supported"),
        ('start: "a"..', "range"),
        ("start: /a(?=b)/", r"\(\?="),
        ("start: /a$/", "inside a regular"),
        ("start: /a/x", "flag x"),
        (r'start: "\ud800"', "no character"),
        ("x", "in no rule"),
        ('start: "a', "not supported"),
        ("start: " + "(" * 99 + '"a"' + ")" * 99, "deeply"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(99)) + 'a99: "x"', "deeply"),
        ("start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(30)) + 'a30: "x"', "more than"),
        ("/" * (MAX_CHARS + 1), "more than"),
    ],
)
def test_what_has_no_pattern_is_named(grammar, said):
    with pytest.raises(GrammarError, match=said):
        lark_pattern(grammar)


def test_a_regular_expression_that_is_too_long():
    with pytest.raises(GrammarError, match="more than"):
        regex_pattern("a" * (MAX_CHARS + 1))
