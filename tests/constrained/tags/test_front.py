"""Structural tags and tools: free text up to a trigger, then the tag, exactly."""

import itertools
import json
from typing import Any

import pytest

from jsg.constrained.run.machine import Machine
from jsg.constrained.special_tokens import may_be_text, special_bytes
from jsg.constrained.tags.front import structural_tag_grammar
from jsg.errors import GrammarError
from tests.constrained.texts import accepts, can_begin, machine_of

INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def machine(format_: dict[str, Any]) -> Machine:
    return machine_of(structural_tag_grammar(json.dumps({"type": "structural_tag", "format": format_})))


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def tag(begin: Any, content: dict[str, Any], end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def check(machine_: Machine, good: list[str | bytes], bad: list[str | bytes]) -> None:
    assert [text for text in good if not accepts(machine_, text)] == []
    assert [text for text in bad if accepts(machine_, text)] == []


NOT_SUPPORTED = {"type": "object", "properties": {"n": {"uniqueItems": True}}}
TOO_LARGE = {"type": "object", "properties": {"n": {"pattern": "^([a-z]+ ?){40,100000}$"}}}


@pytest.mark.parametrize(("schema", "is_possible"), [(INTEGER, True), (NOT_SUPPORTED, False), (TOO_LARGE, False)])
def test_a_schema_that_is_enforced_if_it_can_be(schema: dict[str, Any], is_possible: bool) -> None:
    format_ = {"type": "json_schema", "json_schema": schema}
    others = ["{}", '{"x": [1, 1]}']
    found = machine(format_ | {"or_any_object": True})
    check(found, ['{"n": 5}', *([] if is_possible else others)], ["[]", *(others if is_possible else [])])
    if not is_possible:
        with pytest.raises(GrammarError):
            machine(format_)


def test_the_older_form() -> None:
    text = json.dumps(
        {
            "type": "structural_tag",
            "structures": [
                {"begin": "<function=f>", "schema": INTEGER, "end": "</function>"},
                {"begin": "<function=g>", "schema": {"type": "boolean"}, "end": "</function>"},
            ],
            "triggers": ["<function="],
        }
    )
    machine_ = machine_of(structural_tag_grammar(text))
    check(
        machine_,
        [
            "",
            "Hello <func",
            "<function=g>true</function>",
            'é <<function=f>{"n": 1}</function> 😀 <function=g>false</function>',
        ],
        ["<function=", "<function=h>1</function>", "x<function=f>{}</function>", "<function=g>true</function"],
    )
    assert can_begin(machine_, "a <function=g>tr") and not can_begin(machine_, "a <function=x")


@pytest.mark.parametrize("triggers", [["ab"], ["aab", "b"], ["aba"], ["a"], ["bb", "ab"], ["abab", "bb", "aaa"]])
@pytest.mark.parametrize(("loops", "excludes"), [(True, []), (False, []), (True, ["ba"])])
def test_free_text_against_a_plain_reader(triggers: list[str], loops: bool, excludes: list[str]) -> None:
    """Every text of up to 8 characters, by a reader that looks for the first trigger character by character."""
    fields = {"type": "dispatch", "rules": [[t, const("c")] for t in triggers], "loop": loops, "excludes": excludes}
    if any(other in t and other != t for t in triggers for other in [*triggers, *excludes]):
        with pytest.raises(GrammarError, match="no trigger may have another"):
            machine(fields)
        return
    machine_ = machine(fields)

    def is_right(text: str) -> bool:
        free = ""
        for i, char in enumerate(text):
            free += char
            if any(free.endswith(each) for each in excludes):
                return False
            if any(free.endswith(each) for each in triggers):
                rest = text[i + 1 :]
                return rest.startswith("c") and (is_right(rest[1:]) if loops else rest == "c")
        return True

    for length in range(8):
        for chars in itertools.product("abc", repeat=length):
            text = "".join(chars)
            assert accepts(machine_, text) == is_right(text), text


def test_free_text_is_utf8() -> None:
    machine_ = machine({"type": "any_text", "excludes": ["é", "日本"]})
    check(
        machine_,
        ["", "aè😀\x00\x7f日", "日日語", "\ud7ff\ue000\U0010ffff"],
        [
            "é",
            "xé",
            "日本",
            "日日本x",
            b"\xc3",
            b"\xe6\x97",
            b"\xff",
            b"\xc0\x80",
            b"\xed\xa0\x80",
            b"\xf4\x90\x80\x80",
        ],
    )
    assert can_begin(machine_, b"\xe6\x97") and not can_begin(machine_, b"\xc3\xa9")


def test_a_tag_ends_where_its_end_first_comes_up() -> None:
    check(
        machine(tag("<t>", {"type": "any_text"}, "</t>")),
        ["<t></t>", "<t>a</</t>", "<t><t></t>"],
        ["<t>", "<t></t></t>", "<t></t>x", "x<t></t>"],
    )
    check(machine(tag("", {"type": "any_text"}, ["aa", "b"])), ["aa", "b", "ccab"], ["aaa", "bb", "a", ""])
    inner = {"type": "triggered_tags", "triggers": ["<i"], "tags": [tag("<i>", const("1"), "</i>")]}
    check(
        machine(tag("<o>", inner, "</o>")),
        ["<o></o>", "<o>a<i>1</i>b</o>"],
        ["<o><i>1</o>", "<o></o></o>", "<o><i>1</i>"],
    )
    sequence = {"type": "sequence", "elements": [const("x"), {"type": "any_text"}]}
    check(machine(tag("(", sequence, ")")), ["(x)", "(xyz)"], ["()", "(x))"])


FORMATS: list[tuple[dict[str, Any], list[str | bytes], list[str | bytes]]] = [
    (const("a"), ["a"], ["", "aa"]),
    ({"type": "json_schema", "json_schema": {"type": "boolean"}}, ["true", "false"], ["1", ""]),
    ({"type": "json_schema", "json_schema": True, "style": "json"}, ['{"a": [1]}'], ["{"]),
    ({"type": "regex", "pattern": "[A-Z]{3}-[0-9]+"}, ["ABC-12"], ["AB-1"]),
    ({"type": "grammar", "grammar": 'root ::= "yes" | no\nno ::= "no"'}, ["yes", "no"], ["maybe"]),
    ({"type": "any_text", "max_chars": 2}, ["", "é😀"], ["abc"]),
    ({"type": "sequence", "elements": [const("a"), const("b")]}, ["ab"], ["a", "b"]),
    ({"type": "or", "elements": [const("a"), const("b")]}, ["a", "b"], ["ab", ""]),
    ({"type": "optional", "content": const("a")}, ["", "a"], ["aa"]),
    ({"type": "star", "content": const("a")}, ["", "aaa"], ["b"]),
    ({"type": "plus", "content": const("a")}, ["a", "aaa"], [""]),
    ({"type": "repeat", "min": 2, "max": 3, "content": const("a")}, ["aa", "aaa"], ["a", "aaaa"]),
    ({"type": "repeat", "min": 1, "max": -1, "content": const("a")}, ["a", "aaaa"], [""]),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("<", const("x"), ">"), tag("[", const("y"), "]")],
            "separator": ",",
        },
        ["", "<x>", "<x>,[y],<x>"],
        ["<x>,", ",", "<x><x>"],
    ),
    (
        {
            "type": "tags_with_separator",
            "tags": [tag("<", const("x"), ">")],
            "separator": "",
            "at_least_one": True,
            "stop_after_first": True,
        },
        ["<x>"],
        ["", "<x><x>"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<", const("x"), ">")], "at_least_one": True},
        ["<x>", "<x> and <x>."],
        ["", "a<x>", "<x><"],
    ),
    (
        {"type": "triggered_tags", "triggers": ["<"], "tags": [tag("<", const("x"), ">")], "stop_after_first": True},
        ["", "a", "a<x>"],
        ["<x>a", "<x><x>"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["<", "<long"],
            "tags": [tag("<long>", const("x"), ""), tag("<a>", const("y"), "")],
            "excludes": ["!"],
        },
        ["a<long>x<a>y", "a"],
        ["a!", "<long>y", "<l"],
    ),
    ({"type": "token", "token": "<|x|>"}, [special_bytes("<|x|>")], ["<|x|>", special_bytes("<|y|>")]),
    (
        {
            "type": "token_triggered_tags",
            "trigger_tokens": ["<|x|>"],
            "tags": [tag({"type": "token", "token": "<|x|>"}, const("1"), {"type": "token", "token": "<|/x|>"})],
        },
        ["<|x|>", b"a" + special_bytes("<|x|>") + b"1" + special_bytes("<|/x|>") + b"b"],
        [special_bytes("<|x|>"), special_bytes("<|x|>") + b"1<|/x|>", b"\xff"],
    ),
    (
        {
            "type": "triggered_tags",
            "triggers": ["x|>", {"type": "token", "token": "<|x|>"}],
            "tags": [tag("x|>", const("1"), ""), tag({"type": "token", "token": "<|x|>"}, const("2"), "")],
        },
        ["<|x|>1", special_bytes("<|x|>") + b"2"],
        ["<|x|>2", special_bytes("<|x|>") + b"1"],
    ),
]


@pytest.mark.parametrize(
    ("format_", "good", "bad"), FORMATS, ids=lambda each: each.get("type") if isinstance(each, dict) else ""
)
def test_formats(format_: dict[str, Any], good: list[str | bytes], bad: list[str | bytes]) -> None:
    check(machine(format_), good, bad)


REFUSED: list[tuple[Any, str]] = [
    ("{", "must be JSON"),
    ([], "the structural tag must be an object, but is a list of 0"),
    ({"type": "x"}, "type must be 'structural_tag'"),
    ({"type": "structural_tag"}, "it must have a member 'triggers'"),
    ({"type": "structural_tag", "format": {"type": "nope"}}, "a format's type must be one of const_string"),
    ({"type": "structural_tag", "format": {"type": "any_tokens"}}, "but got 'any_tokens'"),
    ({"type": "structural_tag", "format": const("a"), "extra": 1}, "it takes no member 'extra'"),
    (
        {"type": "structural_tag", "format": const("a") | {"weight": 2}},
        "structural tag.format: it takes no member 'weight'",
    ),
    (
        {"type": "structural_tag", "format": {"type": "const_string", "value": 1}},
        "value must be text, but got a number",
    ),
    ({"type": "structural_tag", "format": const("\ud800")}, "without lone surrogates"),
    ({"type": "structural_tag", "format": {"type": "sequence", "elements": []}}, "a list that is not empty"),
    (
        {"type": "structural_tag", "format": {"type": "sequence", "elements": [1]}},
        "format.elements[0] must be an object",
    ),
    ({"type": "structural_tag", "format": {"type": "any_text", "max_tokens": 5}}, "cannot count tokens"),
    (
        {"type": "structural_tag", "format": tag("a", {"type": "any_text", "max_chars": 5}, "b")},
        "may have max_chars only",
    ),
    (
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}, "style": "yaml"}},
        "style must be one of json, qwen_xml",
    ),
    (
        {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": {}, "special_tokens": ["<a>"]}},
        "it takes no member 'special_tokens' here",
    ),
    ({"type": "structural_tag", "format": {"type": "token", "token": 5}}, "token must be text"),
    (
        {"type": "structural_tag", "format": {"type": "repeat", "min": 3, "max": 2, "content": const("a")}},
        "repeat must have 0 ≤ min ≤ max",
    ),
    (
        {"type": "structural_tag", "triggers": ["<"], "structures": [{"begin": "x", "schema": {}, "end": ""}]},
        "each tag must begin with one of the triggers, but got 'x'",
    ),
    (
        {"type": "structural_tag", "triggers": ["<", "!"], "structures": [{"begin": "<", "schema": {}, "end": ""}]},
        "each trigger must begin a tag, but got '!'",
    ),
    (
        {"type": "structural_tag", "format": {"type": "dispatch", "rules": [["a", const("b")], ["a", const("c")]]}},
        "no trigger may have another trigger",
    ),
    (
        {"type": "structural_tag", "format": {"type": "regex", "pattern": "(a"}},
        "the structural tag.format: ",
    ),
]


@pytest.mark.parametrize(("value", "message"), REFUSED)
def test_refusals(value: Any, message: str) -> None:
    with pytest.raises(GrammarError) as error:
        structural_tag_grammar(value if isinstance(value, str) else json.dumps(value))
    assert message in str(error.value)
    assert error.value.param == "structural_tag"


def test_equal_schemas_have_one_set_of_rules() -> None:
    tags = [tag(f"<{i}>", {"type": "json_schema", "json_schema": INTEGER}, "</>") for i in range(40)]
    text = json.dumps({"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<"], "tags": tags}})
    one = json.dumps({"type": "structural_tag", "format": {"type": "json_schema", "json_schema": INTEGER}})
    assert len(structural_tag_grammar(text).rules) <= len(structural_tag_grammar(one).rules) + 3


def test_special_tokens_are_spelled_beside_all_text() -> None:
    tokens = [b"a", b"", b"\xff", b"\xfe\xff", b"\xe6", special_bytes("<tool>")]
    assert [may_be_text(token) for token in tokens] == [True, True, False, False, True, False]
