"""Grammars of calls in other styles than JSON: what they allow is read as valid arguments; templates keep to them."""

import json
import random
from typing import Any, get_args

import pytest

from jsg.constrained.call_styles import CALL_MARKS, CallStyle, is_plain_name
from jsg.constrained.run.machine import Machine
from jsg.constrained.special_tokens import FIRST_BYTE, LAST_BYTE, named_tokens, special_bytes, spelled
from jsg.constrained.tags.front import structural_tag_grammar
from jsg.errors import GrammarError
from jsg.speech.rules.styled_calls import styled_call
from jsg.types import GrammarSpec
from tests.constrained.aids import DeadEnd, Judge
from tests.constrained.texts import accepts, can_begin, machine_of
from tests.speech.answers.styled_calls import NAMES, forbidden_in_strings, json_read, random_tool, written

STYLES: tuple[CallStyle, ...] = get_args(CallStyle)
SPECIAL = {
    "glm_xml": ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"),
    "deepseek_xml": ("｜DSML｜",),
    "gemma": ('<|"|>',),
    "function_gemma": ("<escape>",),
}


def tag(style: CallStyle, schema: dict[str, Any], special: tuple[str, ...] = (), *, is_strict: bool = True) -> str:
    arguments = {"type": "json_schema", "json_schema": schema} | ({} if is_strict else {"or_any_object": True})
    call = styled_call("f", arguments, style, special)
    elements = [{"type": "const_string", "value": part} if isinstance(part, str) else part for part in call]
    return json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})


def machine(
    style: CallStyle, schema: dict[str, Any], special: tuple[str, ...] = (), *, is_strict: bool = True
) -> Machine:
    text = tag(style, schema, special, is_strict=is_strict)
    return machine_of(structural_tag_grammar(text, additional_properties="closed"))


def walk(machine_: Machine, style: CallStyle, special: tuple[str, ...], chance: random.Random) -> str | None:
    """A random call that the machine allows; None where it did not come to its end soon."""
    marks = CALL_MARKS[style]
    ends = [forbidden_in_strings(style) or '"', marks.end, "]", "}", ",", *NAMES, "null", "True", "12", "\n"]
    hints = [spelled(end, special) for end in ends] + [end.encode() for end in ends]
    config, text = machine_.start(), bytearray()
    while len(text) < 1_500:
        allowed = sorted(machine_.allowed_bytes(config))
        if not allowed:
            if not machine_.is_accepting(config):
                raise DeadEnd(bytes(text))
            return text.replace(bytes((FIRST_BYTE,)), b"").replace(bytes((LAST_BYTE,)), b"").decode()
        plain = [byte for byte in allowed if 0x20 <= byte < 0x7F]
        following = bytes((chance.choice(plain if plain and chance.random() < 0.8 else allowed),))
        if chance.random() < 0.2 + len(text) / 500:
            possible = [hint for hint in hints if machine_.advance(config, hint) is not None]
            following = chance.choice(possible) if possible else following
        after = machine_.advance(config, following)
        assert after is not None
        config, text = after, text + following
    return None


def check_agreement(style: CallStyle, seed: int, count: int) -> None:
    chance = random.Random(f"{style} {seed}")
    num_whole = 0
    for i in range(count):
        special = SPECIAL.get(style, ()) if i % 2 else ()
        schema, arguments = random_tool(style, chance)
        machine_ = machine(style, schema, special)
        ordered = {name: arguments[name] for name in schema["properties"] if name in arguments}
        text = written(style, ordered, chance)
        # A special token is never a part of a string.
        if not any(token in json.dumps(arguments, ensure_ascii=False) for token in special):
            assert accepts(machine_, spelled(text, special)), (schema, text)
        judge = Judge(schema)
        for _ in range(2):
            call = walk(machine_, style, special, chance)
            if call is not None:
                num_whole += 1
                assert judge.error(json_read(style, schema, call)) is None, (schema, call)
    assert num_whole > count


@pytest.mark.parametrize("style", STYLES)
def test_grammar_reader_and_templates_agree(style: CallStyle) -> None:
    check_agreement(style, seed=1, count=4)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_grammar_reader_and_templates_agree_on_many_tools(style: CallStyle) -> None:
    check_agreement(style, seed=2, count=100)


def qwen(value: str) -> str:
    return f"<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>"


def glm(value: str) -> str:
    return f"f\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n</tool_call>"


def of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string"}, ["", "a\n", "5", "</parameter", "</function>"], ["a</parameter>b"]),
        ({"type": "string", "maxLength": 3}, ["", "a\nb", "<é>"], ["abcd"]),
        ({"type": "string", "minLength": 1}, ["ab", "</"], [""]),
        ({"type": "string", "pattern": "^a.*b$"}, ["ab", "a<b"], ["a", "a</parameter>b"]),
        ({"enum": ["x y", "", 5]}, ["x y", "", "5"], ["x"]),
        ({"enum": ["5", "None", "x", 5, None]}, ["5", "None", "null", "x"], ['"x"']),
        ({"type": "boolean"}, ["true", "True"], ["TRUE", ""]),
        ({"type": ["string", "null"]}, ["null", "None", "x", "[1"], []),
        ({"type": ["string", "null"], "maxLength": 2}, ["null", "x"], ["abc"]),
        ({"type": "array", "items": {"enum": [1, True]}}, ["[]", "[1, true]"], ["[True]", "[2]"]),
        ({"type": "array", "items": {"type": "string"}}, ['["</parameter>"]'], ["[x]"]),
    ],
)
def test_values_of_xml_styles(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    machine_ = machine("qwen_xml", of(schema))
    assert [value for value in good if not accepts(machine_, qwen(value))] == []
    assert [value for value in bad if accepts(machine_, qwen(value))] == []
    machine_ = machine("glm_xml", of(schema))
    assert [value for value in good if not accepts(machine_, glm(value))] == []


@pytest.mark.parametrize(
    ("style", "good", "bad"),
    [
        ("python", 'f(a=[True, None, "\\"x"])', "f(a=[true])"),
        ("python", 'f(a={"k": False})', "f(a={k: False})"),
        ("gemma", 'call:f{a:[true,None,null,<|"|>"x<|"|>]}', "call:f{a:[True]}"),
        ("gemma", "call:f{a:{k:false}}", 'call:f{a:{"k":false}}'),
        ("function_gemma", "call:f{a:[<escape><|<escape>]}", "call:f{a:[<escape>"),
        ("gemma", "call:f{a:1,B:2,c:3}", "call:f{a:1,c:3,B:2}"),
    ],
)
def test_values_of_notations(style: CallStyle, good: str, bad: str) -> None:
    machine_ = machine(style, {"type": "object", "properties": {"c": {}, "B": {}, "a": {}}, "required": ["a"]})
    assert accepts(machine_, good) and not accepts(machine_, bad)


def test_which_arguments_there_are() -> None:
    schema = of({"type": "null"}) | {
        "properties": {"b": {"type": "null"}, "a": {"type": "null"}, "c": {"type": "null"}}
    }
    machine_ = machine("python", schema)
    good = ["a=None", "b=None, a=None", "b=None, a=None, c=None"]
    bad = ["", "b=None", "a=None, b=None", "a=None,", "a=None, d=None", "a=None, a=None"]
    assert [text for text in good if not accepts(machine_, f"f({text})")] == []
    assert [text for text in bad if accepts(machine_, f"f({text})")] == []


def test_a_mark_that_is_a_special_token_is_not_written_as_text() -> None:
    special = SPECIAL["gemma"]
    machine_ = machine("gemma", of({"type": "string"}), special)
    quote = special_bytes('<|"|>')
    assert accepts(machine_, b"call:f{a:" + quote + b'x<|"' + quote + b"}")
    assert accepts(machine_, b"call:f{a:" + quote + b'x<|"|>}')  # a reader of the text sees the same
    assert not can_begin(machine_, 'call:f{a:<|"|>')
    text = tag("gemma", of({"type": "string"}), special)
    assert named_tokens(GrammarSpec("structural_tag", text)) == ['<|"|>']
    around = {"type": "structural_tag", "format": {"type": "whole", "kind": "structural_tag", "text": text}}
    assert named_tokens(GrammarSpec("structural_tag", json.dumps(around))) == ['<|"|>']


REFUSED = [
    ("qwen_xml", {"type": ["string", "integer"], "minimum": 5}, "of type integer"),
    ("qwen_xml", {"anyOf": [{"enum": ["a"]}, {"type": "array", "items": {"type": "string"}}]}, "of type array"),
    ("glm_xml", {"$ref": "#x"}, "of type array"),
    ("glm_xml", {"$id": "http://h/b", "allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"type": "number"}}}, "be seen"),
    ("qwen_xml", {"enum": ["a", "b</parameter>c"]}, "</parameter>"),
    ("qwen_xml", {"anyOf": [{"const": "5"}, {"type": "integer", "minimum": 9}]}, "'5' under enum or const is read as"),
    ("glm_xml", {"const": "</arg_value>"}, "</arg_value>"),
    ("deepseek_xml", {"enum": ["</｜DSML｜parameter>"]}, "must not have"),
    ("minimax_xml", {"enum": ["</parameter>", "x"]}, "cannot be escaped"),
    ("gemma", {"enum": ["a", '<|"|>']}, "cannot be escaped"),
    ("function_gemma", {"enum": [["<escape>"], "x"]}, "<escape>"),
    ("gemma", {"type": "string", "maxLength": 5_000}, "maxLength"),
    ("gemma", {"type": "object", "properties": {"a b": {}}}, "a b"),
    ("python", {"type": "array", "uniqueItems": True}, "uniqueItems"),
]


@pytest.mark.parametrize(("style", "schema", "reason"), REFUSED)
def test_what_a_style_cannot_tell_apart_is_refused(style: CallStyle, schema: dict[str, Any], reason: str) -> None:
    whole = of(schema) | {"$defs": {"x": {"$anchor": "x", "type": "string", "minLength": 2}}}
    with pytest.raises(GrammarError, match=reason):
        machine(style, whole)
    # The arguments are then any object, but are read as the schema says.
    loose = machine(style, whole, is_strict=False)
    chance = random.Random(3)
    calls = [walk(loose, style, (), chance) for _ in range(10)]
    assert [isinstance(json.loads(json_read(style, whole, call)), dict) for call in calls if call is not None]


@pytest.mark.parametrize("style", [style for style in STYLES if style != "python"])
def test_every_known_string_can_be_written_or_is_refused(style: CallStyle) -> None:
    chance, mark = random.Random(0), forbidden_in_strings(style)
    texts = ["", "\n", "null", "5", "True", "[1]", '"a"', mark[:-1], mark[1:], f"a\n{mark[:-1]}", " x ", "</", "\x1c"]
    written_ = [written(style, {"a": text}, chance) for text in texts]
    machine_ = machine(style, of({"enum": texts}))
    for text, call in zip(texts, written_, strict=True):
        assert accepts(machine_, call), ascii(text)
        assert json.loads(json_read(style, of({"enum": texts}), call)) == {"a": text}
    with pytest.raises(GrammarError, match="cannot be escaped"):
        machine(style, of({"enum": [*texts, f"x{mark}y"]}))


def test_names_that_a_style_cannot_write() -> None:
    with pytest.raises(GrammarError, match="a b"):
        machine("python", {"type": "object", "properties": {"a b": {}}})
    with pytest.raises(GrammarError, match="f>"):
        styled_call("f>", {}, "qwen_xml")


ODD = [chr(code) for code in range(0x3100) if chr(code).isspace() or code < 0x21 or 0x7F <= code <= 0xA0] + [
    *"\u00ad\u180e\u200b\u2060\ufeff\ufffe",
    *(chr(code) for code in range(0x21, 0x7F) if not chr(code).isalnum()),
]


@pytest.mark.parametrize("style", STYLES)
def test_grammar_and_reader_agree_on_every_name(style: CallStyle) -> None:
    """A name that the grammar lets through, declared or not, is one that the reader reads."""
    chance = random.Random(0)
    names = [template.format(sign) for sign in ODD for template in ("a{0}b", "{0}")[: 1 + sign.isspace()]]
    plain = {name: {"type": "string"} for name in names if is_plain_name(name)}
    open_schema = {"type": "object", "additionalProperties": {"type": "string"}}
    machines = machine(style, open_schema), machine(style, {"type": "object", "properties": plain})
    assert 0 < len(plain) < len(names)
    for name in names:
        text = written(style, {name: "x"}, chance)
        takes = [accepts(each, text.encode()) for each in machines]
        assert takes[1] == (name in plain) and takes[0] == takes[1], ascii(name)
        if takes[0]:
            assert json.loads(json_read(style, open_schema, text)) == {name: "x"}, ascii(name)
    for sign in "\x1c\x85\ufeff=":
        with pytest.raises(GrammarError, match="white space"):
            machine(style, {"type": "object", "properties": {f"a{sign}": {}}})
