"""Calls with arguments in other styles than JSON: what templates write is read back, whole or piece by piece."""

import itertools
import json
import random
import re
import time
from typing import Any, get_args

import pytest

from jsg.constrained.call_styles import ArgumentTypes, CallStyle
from jsg.speech.answers.json_scanner import ScanStep
from jsg.speech.answers.raw_value import MAX_SCALAR_LEN
from tests.speech.answers.styled_calls import forbidden_in_strings, fragments, json_read, random_tool, reader, written

STYLES: tuple[CallStyle, ...] = get_args(CallStyle)
_MARK = re.compile(r'(</?[^<>]*>|<\|"\|>|[{}()\[\],:=])')


def check_round_trips(style: CallStyle, seed: int, count: int) -> None:
    chance = random.Random(f"{style} {seed}")
    for _ in range(count):
        schema, arguments = random_tool(style, chance)
        text = written(style, arguments, chance)
        for pieces in ([text], list(text), _MARK.split(text)):
            found = reader(style, schema)
            assert json.loads("".join(fragments(found, pieces))) == arguments, text
            assert (found.name, found.has_arguments, found.text, found.num_read) == ("f", True, text, len(text))


@pytest.mark.parametrize("style", STYLES)
def test_what_templates_write_is_read_back(style: CallStyle) -> None:
    check_round_trips(style, seed=1, count=30)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_a_thousand_calls_are_read_back(style: CallStyle) -> None:
    check_round_trips(style, seed=2, count=1_000)


@pytest.mark.parametrize("style", STYLES)
def test_long_strings_come_while_they_are_written(style: CallStyle) -> None:
    chance = random.Random(5)
    mark = forbidden_in_strings(style) or "'"
    value = "".join(chance.choice(("x", "\n", "é", '"', mark[:3], mark[:-1])) for _ in range(300)) + "x"
    text = written(style, {"a": value}, chance)
    start = text.index("x")
    end = text.rindex("x")
    found = reader(style, {"properties": {"a": {"type": "string"}}})
    given = ""
    most_held = 0
    for i, char in enumerate(text):
        assert found.push(char) is not ScanStep.WRONG
        given += found.take_fragment()
        if start <= i <= end:
            # JSON has no fewer characters than the text of any style.
            most_held = max(most_held, i + 1 - start - (len(given) - given.find("x")) * ("x" in given))
    assert 0 < most_held < len(mark) + 1
    assert json.loads(given) == {"a": value}


TYPES = {
    "properties": {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "o": {"type": "object"},
        "m": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "c": {"enum": ["1", 2]},
    }
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("s", "12", "12"),
        ("s", "", ""),
        ("s", '"a"', '"a"'),
        ("s", "\n x \n", "\n x \n"),
        ("i", " 12\n", 12),
        ("i", "True", True),
        ("i", "twelve", "twelve"),
        ("i", "  ", ""),
        ("o", ' {"a": [1, "<"]}\n', {"a": [1, "<"]}),
        ("m", "null", None),
        ("m", "None", None),
        ("m", "nullx", "nullx"),
        ("m", "5", "5"),
        ("m", " null", " null"),
        ("c", "1", 1),
        ("?", "[1, 2]", [1, 2]),
        ("?", "[1, 2] and", "[1, 2] and"),
        ("?", '"a"', '"a"'),
        ("?", "-1.5e3", -1500.0),
        ("?", "NaN", "NaN"),
    ],
)
def test_how_a_text_without_quotes_is_taken(key: str, text: str, value: Any) -> None:
    call = f"<function=f>\n<parameter={key}>\n{text}\n</parameter>\n</function>"
    assert json.loads(json_read("qwen_xml", TYPES, call)) == {key: value}
    call = f"f\n<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>"
    assert json.loads(json_read("glm_xml", TYPES, call)) == {key: value}


@pytest.mark.parametrize(
    ("style", "text", "arguments"),
    [
        ("qwen_xml", "\n\n <function=f>\n</function>", {}),
        ("qwen_xml", "<function=f><parameter=s>a\n</parameter><parameter=i>\n1</parameter></function>",
         {"s": "a", "i": 1}),
        ("qwen_xml", "<function=f>\n<parameter=s>\n</parameter>\n</function>", {"s": ""}),
        ("glm_xml", "\nf </tool_call>", {}),
        ("deepseek_xml",
         '<｜DSML｜invoke name="f"> <｜DSML｜parameter name="i">1</｜DSML｜parameter> </｜DSML｜invoke>',
         {"i": 1}),
        ("python", r"""g(a='it\'s', b="\x41\101\u00e9\q", c=(1, .5, 5., 0x1F, 1_000,), d={'k': [None],},)""",
         {"a": "it's", "b": "AAé\\q", "c": [1, 0.5, 5.0, 31, 1000], "d": {"k": [None]}}),
        ("python", 'f(a="\\ud83d\\ude00\\/", b=true, c=[ ], d={ }, e="\\0")',
         {"a": "😀/", "b": True, "c": [], "d": {}, "e": "\0"}),
        ("gemma", 'call:f{"a": "b\\n", c : [ <|"|><|"|> ] , <|"|>d e<|"|>:{f:None}}',
         {"a": "b\n", "c": [""], "d e": {"f": None}}),
    ],
)  # fmt: skip
def test_other_spellings_that_models_write(style: CallStyle, text: str, arguments: dict[str, Any]) -> None:
    assert json.loads(json_read(style, TYPES, text)) == arguments


@pytest.mark.parametrize(
    ("style", "text", "is_begun"),
    [
        ("qwen_xml", '{"name": "f"}', False),
        ("qwen_xml", "<function=h>\n", False),
        ("qwen_xml", "<function=" + "f" * 1_001, False),
        ("qwen_xml", "<function=f> a call", False),
        ("qwen_xml", "<function=f>\n<parameter=i>\n[1\n</parameter>\n", True),
        ("qwen_xml", "<function=f>\n<parameter=o>\n{} x", True),
        ("qwen_xml", "<function=f>\n<parameter=i>\n" + "1" * (MAX_SCALAR_LEN + 1), True),
        ("qwen_xml", "<function=f>\n<parameter=>", False),
        ("qwen_xml", "<function=f>\n<parameter=s\n", False),
        ("glm_xml", '{"name": "f"}<', False),
        ("glm_xml", "f\nand", False),
        ("deepseek_xml", '<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="s" string="yes">', True),
        ("python", "print(1)", False),
        ("python", "f(x)", False),
        ("python", "f(1)", False),
        ("python", "f(a=b)", True),
        ("python", "f(a=f())", True),
        ("python", "f(a=[1)", True),
        ("python", "f(a=)", True),
        ("python", "f(a=1 b=2)", True),
        ("python", "f(a={1: 2})", True),
        ("python", "f(a=1e)", True),
        ("python", "f(a=007)", True),
        ("python", 'f(a="\\xg', True),
        ("python", "f(a=" + "[" * 501, True),
        ("gemma", "call:h{", False),
        ("gemma", "code:f{", False),
        ("gemma", 'call:f{a:<|"x', True),
        ("gemma", "call:f{a:text}", True),
    ],
)
def test_what_is_no_call(style: CallStyle, text: str, is_begun: bool) -> None:
    found = reader(style, TYPES)
    steps = itertools.takewhile(lambda step: step is ScanStep.INSIDE, map(found.push, text))
    num_inside = len(list(steps))
    assert num_inside == found.num_read < len(text)
    assert found.text == text[:num_inside]
    assert found.has_arguments == is_begun


def test_types_of_arguments() -> None:
    loop = {"$ref": "#/$defs/loop"}
    schema = {
        "properties": {
            "a": {"allOf": [{"type": ["string", "integer"]}, {"enum": ["x", None]}]},
            "b": {"oneOf": [{"const": 1.5}, {"$ref": "#/$defs/list"}]},
            "c": loop,
            "d": {"$ref": "elsewhere"},
            "e": True,
        },
        "additionalProperties": {"type": "number"},
        "$defs": {"list": {"type": "array"}, "loop": loop},
    }
    types = ArgumentTypes.read(schema)
    assert types.of("a") == {"string"}
    assert types.of("b") == {"number", "integer", "array"}
    assert all(len(types.of(name)) == 7 for name in "cde")
    assert types.of("f") == {"number", "integer"}
    assert len(ArgumentTypes.read(schema | {"patternProperties": {"^x": {}}}).of("x")) == 7


@pytest.mark.parametrize(
    "text",
    [
        "<function=f>\n<parameter=?>\n[" + "1," * 20_000,
        "<function=f>\n<parameter=s>\n" + "\n</par" * 5_000,
        "<function=f>\n<parameter=o>\n[" + '"<",' * 8_000,
        "\n" * 30_000,
    ],
    ids=range(4),
)
def test_time_is_linear(text: str) -> None:
    started = time.thread_time()
    found = reader("qwen_xml", TYPES)
    assert all(found.push(char) is ScanStep.INSIDE for char in text)
    assert time.thread_time() - started < 2


def check_broken_calls(style: CallStyle, count: int) -> None:
    """Whatever a reader takes for a whole call has JSON as its arguments."""
    chance = random.Random(f"{style} broken")
    num_whole = 0
    for _ in range(count):
        schema, arguments = random_tool(style, chance)
        chars = list(written(style, arguments, chance))
        for _ in range(chance.randint(1, 3)):
            place = chance.randrange(len(chars) + 1)
            chars[place : place + chance.randint(0, 2)] = chance.choice(
                ("", '"', "\\", "<", "x", "0", ".", "]", "}", "=", ",")
            )
        found = reader(style, schema)
        inside = list(itertools.takewhile(lambda step: step is ScanStep.INSIDE, map(found.push, chars)))
        if found.num_read > len(inside):
            num_whole += 1
            assert isinstance(json.loads(found.take_fragment()), dict), "".join(chars)
    assert num_whole


@pytest.mark.parametrize("style", STYLES)
def test_broken_calls_are_no_calls_or_have_json(style: CallStyle) -> None:
    check_broken_calls(style, 100)


@pytest.mark.slow
@pytest.mark.parametrize("style", STYLES)
def test_thousands_of_broken_calls(style: CallStyle) -> None:
    check_broken_calls(style, 4_000)
