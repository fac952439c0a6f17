"""Calls of tools in a text: the same calls are found in a whole text and piece by piece, and nothing else."""

import dataclasses
import itertools
import json
import random
import time

import pytest

from jsg.speech.answers.json_scanner import MAX_DEPTH, JsonScanner, ScanStep
from jsg.speech.answers.tool_calls import CallDelta, ContentDelta, ParsedAnswer, ToolCallParser
from jsg.speech.dialects import DIALECTS, detect_dialect
from tests.speech.parsed import join_deltas, parse_tool_calls

NAMES = ("f", "get_all")
Calls = list[tuple[str, str]]

CASES: list[tuple[str, str, str | None, Calls]] = [
    ("hermes", "", "", []),
    ("hermes", "No call: a < b, {x} [y].\n", "No call: a < b, {x} [y].\n", []),
    ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": [1, "}\\"</tool_call>"]}}\n</tool_call>', None,
     [("f", '{"a": [1, "}\\"</tool_call>"]}')]),
    ("hermes", 'I call.\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
     '<tool_call>\n{"name":"get_all","arguments":{"é": "😀"}}\n</tool_call>\n', "I call.",
     [("f", "{}"), ("get_all", '{"é": "😀"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>', None, [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"arguments": {"a": -1.5e3}, "id": 12, "name": "f"}</tool_call> So.', " So.",
     [("f", '{"a": -1.5e3}')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', None, [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}', None, [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}}\n</tool_c', None, [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}} x</tool_call>', " x", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tr', None, [("f", '{"a": tr')]),
    ("hermes", '<tool_call>{"name": "g", "arguments": {}}</tool_call>', ..., []),
    ("hermes", '<tool_call>{"name": "f", "name": "f", "arguments": {}}</tool_call>', ..., []),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', ..., []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', ..., []),
    ("hermes", "<tool_call>f()</tool_call>", ..., []),
    ("hermes", "<tool_call>", ..., []),
    ("hermes", '<tool_call>{"na', ..., []),
    ("hermes", "a <tool_cal", ..., []),
    ("hermes", '<tool_call>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>', "<tool_call>", [("f", "{}")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', None, [("f", '{"a": 1}')]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "get_all", "parameters": {"q": ";"}}',
     None, [("f", "{}"), ("get_all", '{"q": ";"}')]),
    ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}\n', None, [("f", "{}")]),
    ("llama3_json", 'Sure: {"name": "f", "parameters": {}}', "Sure:", [("f", "{}")]),
    ("llama3_json", '{"name": "Harry", "age": 15}', ..., []),
    ("llama3_json", '{"name": "f", "age": 15, "x": [}', ..., []),
    ("llama3_json", "<|python_tag|>print(1)", ..., []),
    ("llama3_json", '{"a": {"name": 1}, "b": 2}', ..., []),
    ("nemotron_json", 'So: <TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "get_all", "arguments": {}}]'
     "</TOOLCALL>", "So:", [("f", '{"a": 1}'), ("get_all", "{}")]),
    ("nemotron_json", '<TOOLCALL>[\n{"name": "f", "arguments": {"a": "]"}}\n]</TOOLCALL>\n', None,
     [("f", '{"a": "]"}')]),
    ("nemotron_json", '<TOOLCALL>[{"name": "f", "arguments": {"a"', None, [("f", '{"a"')]),
    ("nemotron_json", "A list: [1, 2]; <TOOLCALL> means a call.", ..., []),
    ("lfm2", '<|tool_call_start|>[f(a="x, y)]", b=1)]<|tool_call_end|>Checking it.', "Checking it.",
     [("f", '{"a": "x, y)]", "b": 1}')]),
    ("lfm2", "Well.<|tool_call_start|>[f(a='ls', b=True),get_all(c=[None, 1.5])]<|tool_call_end|>", "Well.",
     [("f", '{"a": "ls", "b": true}'), ("get_all", '{"c": [null, 1.5]}')]),
    ("lfm2", "<|tool_call_start|>[f()]", None, [("f", "{}")]),
    ("lfm2", "Call [f(a=1)] to do it.", ..., []),
    ("lfm2", "<|tool_call_start|>[g(a=1)]<|tool_call_end|>", ..., []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "get_all", "arguments": {}}]', None,
     [("f", '{"a": 1}'), ("get_all", "{}")]),
    ("mistral", '[TOOL_CALLS] [ {"arguments": {}, "name": "f", "id": "abcdefghi"} ]', None, [("f", "{}")]),
    ("mistral_args", 'x [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_all[CALL_ID]ab12[ARGS]{}', "x",
     [("f", '{"a": 1}'), ("get_all", "{}")]),
    ("mistral_args", '[TOOL_CALLS]f{"a": 1}', None, [("f", '{"a": 1}')]),
    ("mistral_args", '[TOOL_CALLS]g[ARGS]{"a": 1}', ..., []),
    ("mistral", "[TOOL_CALLS][]", "", []),
    ("mistral", "[TOOL_CALLS] [ ] So.", " So.", []),
    ("nemotron_json", "<TOOLCALL>[]</TOOLCALL>", "", []),
    ("nemotron_json", "So: <TOOLCALL>[ ]\n</TOOLCALL> It is.", "So:  It is.", []),
    ("nemotron_json", '<TOOLCALL>[] <TOOLCALL>[{"name": "f", "arguments": {}}]</TOOLCALL>', None, [("f", "{}")]),
    ("nemotron_json", "<TOOLCALL>[]</TOOL", "</TOOL", []),
    ("lfm2", "<|tool_call_start|>[]<|tool_call_end|>None.", "None.", []),
    ("pythonic", "[]", ..., []),
    ("mistral", "[TOOL_CALLS][1]", ..., []),
    ("mistral_args", "[TOOL_CALLS] and so on", ..., []),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name"', ', {"name"', [("f", "{}")]),
]  # fmt: skip


def parser(dialect: str, *, streams: bool = True) -> ToolCallParser:
    return ToolCallParser(DIALECTS[dialect], NAMES, "call{}".format, streams_arguments=streams)


def whole(dialect: str, text: str) -> ParsedAnswer:
    return parse_tool_calls(text, DIALECTS[dialect], NAMES, "call{}".format)


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), CASES)
def test_answers_taken_apart(dialect: str, text: str, content: str | None, calls: Calls) -> None:
    answer = whole(dialect, text)
    assert [(call.name, call.arguments) for call in answer.calls] == calls
    assert [call.id for call in answer.calls] == [f"call{i}" for i in range(len(calls))]
    assert answer.content == (text if content is ... else content)


@pytest.mark.parametrize(("dialect", "text", "content", "calls"), CASES)
def test_pieces_give_what_the_whole_gives(dialect: str, text: str, content: str | None, calls: Calls) -> None:
    expected = whole(dialect, text)
    random_ = random.Random(3)
    cuts = [[i] for i in range(len(text) + 1)]
    cuts += [sorted(random_.choices(range(len(text) + 1), k=6)) for _ in range(20)]
    cuts.append(list(range(len(text))))
    for cut in cuts:
        reader = parser(dialect)
        ends = [0, *cut, len(text)]
        deltas = [delta for a, b in itertools.pairwise(ends) for delta in reader.push(text[a:b])]
        deltas += reader.finish()
        assert dataclasses.replace(join_deltas(deltas), is_cut=reader.is_cut) == expected
        assert reader.num_calls == len(expected.calls)
        seen: set[int] = set()
        for delta in deltas:
            if isinstance(delta, CallDelta):
                assert (delta.id is not None) == (delta.name is not None) == (delta.index not in seen)
                seen.add(delta.index)
            else:
                assert delta.text


def test_arguments_come_as_they_are_written_and_text_at_once() -> None:
    reader = parser("hermes")
    assert reader.push("Hi there") == [ContentDelta("Hi there")]
    assert reader.push("\n<tool_") == []
    assert reader.push('call>\n{"name": "f", "argu') == []
    assert reader.push('ments": {') == [CallDelta(0, "call0", "f", "{")]
    assert reader.push('"a": "x') == [CallDelta(0, None, None, '"a": "x')]
    assert reader.push('"}') == [CallDelta(0, None, None, '"}')]
    assert reader.push("}\n</tool_call>") == []
    assert reader.finish() == []


def test_a_broken_call_is_text_when_arguments_are_held_back() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>'
    reader = parser("hermes", streams=False)
    assert join_deltas([*reader.push(text), *reader.finish()]) == ParsedAnswer(text, ())
    reader = parser("hermes")
    answer = join_deltas([*reader.push(text), *reader.finish()])
    assert [call.arguments for call in answer.calls] == ['{"a": tru']
    assert answer.content == "}}"


def test_any_name_without_a_list_of_tools() -> None:
    answer = parse_tool_calls('<tool_call>{"name": "any", "arguments": {}}</tool_call>', DIALECTS["hermes"], None, str)
    assert [(call.id, call.name) for call in answer.calls] == [("0", "any")]


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"a": "' * 5_000,
        "<tool_call>" + " " * 30_000,
        " " * 30_000 + "x",
        '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 30_000,
        '<tool_call>{"x": "' + "x" * 30_000,
        '<tool_call>{"name": "f", "arguments": {}}' + "\n" * 30_000,
        '<tool_call>{"x":' + "[" * 30_000,
    ],
    ids=range(7),
)
def test_time_is_linear_and_nothing_is_lost(text: str) -> None:
    started = time.thread_time()
    reader = parser("hermes")
    deltas = [delta for char in text for delta in reader.push(char)]
    answer = join_deltas([*deltas, *reader.finish()])
    assert time.thread_time() - started < 4
    if not answer.calls:
        assert answer.content == text


def test_dialects_are_seen_in_templates() -> None:
    assert detect_dialect(None) is None


def scan(text: str) -> str:
    """The scanner's verdict on a text: "whole", "more" is needed, or "wrong"."""
    scanner = JsonScanner()
    for i, char in enumerate(text):
        step = scanner.push(char)
        if step is ScanStep.WRONG:
            return "wrong"
        if step is ScanStep.LAST:
            return "whole" if i == len(text) - 1 else "wrong"
    return "more"


def test_the_scanner_agrees_with_the_json_module() -> None:
    random_ = random.Random(5)
    seeds = ['{"a": [1, -0.5e+3, "\\u00e9\\n"], "b": {}, "c": [true, false, null, []]}', '[[], {"": ""}]', '"\\\\"']
    for _ in range(6_000):
        chars = list(random_.choice(seeds))
        for _ in range(random_.randint(0, 2)):
            chars[random_.randrange(len(chars))] = random_.choice('{}[]",:0123.eE+-tfn \\u\n\x01x')
        text = "".join(chars).strip()
        try:
            json.loads(text)
        except ValueError:
            assert scan(text) != "whole", text
        else:
            # A number alone ends where something else follows: there nothing does.
            assert scan(text) == ("more" if text[-1].isdigit() and text[0] not in '{["' else "whole"), text


def test_the_scanner_stops_at_a_depth() -> None:
    assert scan("[" * MAX_DEPTH) == "more"
    assert scan("[" * (MAX_DEPTH + 1)) == "wrong"
    assert scan("NaN") == "wrong"
    assert scan("01") == "wrong"
