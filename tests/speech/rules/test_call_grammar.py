"""The grammars of tool calls: what each dialect's chat template writes, and no other call."""

import json
import random
from typing import Any, Literal

import jsonschema
import pytest

from jsg.constrained.call_styles import ArgumentTypes
from jsg.constrained.run.machine import Machine
from jsg.constrained.special_tokens import FIRST_BYTE, LAST_BYTE, special_bytes
from jsg.constrained.tags.front import structural_tag_grammar
from jsg.errors import GrammarError
from jsg.speech.dialects import DIALECTS
from jsg.speech.rules.call_grammar import Tool, tools_to_structural_tag
from tests.constrained.texts import accepts, can_begin, machine_of, most_heads
from tests.speech.dialects import NAMES, PARAMETERS, random_calls, written
from tests.speech.parsed import parse_tool_calls

INTEGER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOLS = [
    Tool("get", None, INTEGER),
    Tool("get_all", None, {"properties": {"q": {"type": "string"}}, "required": ["q"]}),
    Tool("ping"),
]
ONE = ("get", {"n": 5})
TWO = ("get_all", {"q": "x}"})
WRONG_NAME = ("put", {"n": 5})
WRONG_ARGUMENTS = ("get", {"n": "five"})

each_dialect = pytest.mark.parametrize("dialect", list(DIALECTS))


def tool_machine(
    dialect: str, choice: Literal["auto", "required"], tools: list[Tool] = TOOLS, **options: Any
) -> Machine:
    spec = tools_to_structural_tag(tools, choice, DIALECTS[dialect], **options)
    return machine_of(structural_tag_grammar(spec.text, additional_properties=spec.additional_properties))


def check(machine: Machine, good: list[str | bytes], bad: list[str | bytes]) -> None:
    for text in good:
        assert accepts(machine, text), text
    for text in bad:
        assert not accepts(machine, text), text


def spelled(dialect: str, text: str) -> bytes:
    """A text with its markers as special tokens."""
    data = text.encode()
    for mark in DIALECTS[dialect].markers:
        data = data.replace(mark.encode(), special_bytes(mark))
    return data


@each_dialect
def test_tools(dialect: str) -> None:
    auto = tool_machine(dialect, "auto")
    single, both = written(dialect, [ONE]), written(dialect, [ONE, TWO])
    wrong = [written(dialect, [WRONG_NAME]), written(dialect, [WRONG_ARGUMENTS]), single[:-1]]
    begun = wrong[1:] if dialect == "pythonic" else wrong  # there only the name of a tool begins a call in a text
    talk = written(dialect, [], "No tool needed: 3 < 4.")
    check(auto, [talk, single, written(dialect, [ONE], "Let me see. "), both], [*begun])
    required = tool_machine(dialect, "required")
    check(required, [single, both, written(dialect, [("ping", {})])], ["", "Hi", talk, *wrong, single + "x"])
    check(tool_machine(dialect, "required", parallel=False), [single], [both, "", talk, *wrong])
    check(tool_machine(dialect, "required", TOOLS[:1]), [single], [written(dialect, [TWO])])
    check(tool_machine(dialect, "auto", parallel=False), [talk, single], [both, *begun])
    assert most_heads(auto, both) <= 2


@each_dialect
def test_free_text_has_no_markers(dialect: str) -> None:
    """Neither as characters nor as special tokens, in front of calls and behind them."""
    record = DIALECTS[dialect]
    for special in ((), record.markers):
        auto = tool_machine(dialect, "auto", special_tokens=special)
        talk = written(dialect, [], "So ")
        for mark in set(record.markers) - set(record.openings([])):
            assert not can_begin(auto, (spelled(dialect, talk) if special else talk.encode()) + mark.encode())
            assert not can_begin(auto, (spelled(dialect, talk) if special else talk.encode()) + special_bytes(mark))


@each_dialect
def test_tools_beside_a_form(dialect: str) -> None:
    form = {"type": "json_schema", "json_schema": {"properties": {"name": {"type": "integer"}}, "required": ["name"]}}
    single, both = written(dialect, [ONE]), written(dialect, [ONE, TWO])
    good, bad = (written(dialect, [], text) for text in ('{"name": 1}', '{"name": "x"}'))
    wrong = ["", "Hi", bad, written(dialect, [WRONG_ARGUMENTS]), "Hi " + single, single + good]
    check(tool_machine(dialect, "auto", form=form), [single, both, good], wrong)
    check(tool_machine(dialect, "auto", form=form, parallel=False), [single, good], [*wrong, both])
    check(tool_machine(dialect, "required", form=form), [single], [*wrong, good])


@each_dialect
def test_markers_may_be_special_tokens(dialect: str) -> None:
    record = DIALECTS[dialect]
    text, talk = written(dialect, [ONE]), written(dialect, [ONE], "x ")
    if record.wrap[0]:
        text = record.wrap[0] + text + record.wrap[1]
    auto = tool_machine(dialect, "auto", special_tokens=record.markers)
    required = tool_machine(dialect, "required", special_tokens=record.markers)
    good = spelled(dialect, text)
    wrong = good.replace(b"5", b'"5"')
    check(auto, [good, spelled(dialect, talk)], [wrong])
    check(required, [good], [wrong, text, b""])
    # Written as plain characters the marker leads to no unchecked call either.
    assert not accepts(auto, text.replace("5", '"5"'))


def test_a_marker_that_ends_the_answer_is_not_written() -> None:
    """The token `<|call|>` ends the answers of gpt-oss, so no grammar may name it, and nothing can follow a call."""
    special = set(DIALECTS["harmony"].markers) - {"<|call|>", "<|return|>"}
    good = spelled("harmony", written("harmony", [ONE]).removesuffix("<|call|>"))
    for choice in ("auto", "required"):
        machine = tool_machine("harmony", choice, special_tokens=special)
        check(machine, [good], [spelled("harmony", written("harmony", [ONE, TWO]))])
        assert not can_begin(machine, good + b"<")


@each_dialect
def test_random_calls_that_templates_write(dialect: str) -> None:
    tools = [Tool(name, None, PARAMETERS) for name in NAMES]
    calls = random_calls(dialect, 3, 8)
    for choice in ("auto", "required"):
        machine = tool_machine(dialect, choice, tools)
        assert all(accepts(machine, written(dialect, calls[i : i + 2])) for i in range(0, 8, 2))


def walk(machine: Machine, dialect: str, chance: random.Random) -> str | None:
    """A random answer that a grammar allows; None where it did not come to its end soon."""
    marks = [mark.encode() for mark in (*DIALECTS[dialect].markers, *DIALECTS[dialect].openings(["get", "ping"]))]
    hints = [*marks, *map(special_bytes, DIALECTS[dialect].markers), *(bytes((byte,)) for byte in b'"}]),n5')]
    config, text = machine.start(), bytearray()
    while len(text) < 500:
        allowed = sorted(machine.allowed_bytes(config))
        if not allowed or (machine.is_accepting(config) and chance.random() < 0.1):
            break
        plain = [byte for byte in allowed if 0x20 <= byte < 0x7F]
        following = bytes((chance.choice(plain if plain and chance.random() < 0.9 else allowed),))
        if chance.random() < 0.15 + len(text) / 300:
            possible = [hint for hint in hints if machine.advance(config, hint) is not None]
            following = chance.choice(possible) if possible else following
        after = machine.advance(config, following)
        assert after is not None
        config, text = after, text + following
    if not machine.is_accepting(config):
        return None
    return text.replace(bytes((FIRST_BYTE,)), b"").replace(bytes((LAST_BYTE,)), b"").decode()


def num_valid_calls(dialect: str, count: int) -> int:
    """Random answers that the grammar allows, as text and with special tokens: the parser reads valid calls."""
    word, number = {"type": "string", "maxLength": 9}, {"type": ["integer", "null"], "maximum": 99}
    properties = {"get": {"n": number, "xs": {"type": "array", "items": word, "maxItems": 2}}, "ping": {"q": word}}
    schemas = {
        name: {"type": "object", "properties": each, "required": [next(iter(each))], "additionalProperties": False}
        for name, each in properties.items()
    }
    types = {name: ArgumentTypes.read(schema) for name, schema in schemas.items()}
    chance = random.Random(f"{dialect} {count}")
    num_calls = 0
    for choice, special in (("auto", ()), ("auto", DIALECTS[dialect].markers), ("required", ())):
        tools = [Tool(name, None, schema) for name, schema in schemas.items()]
        machine = tool_machine(dialect, choice, tools, special_tokens=special)
        for text in filter(None, (walk(machine, dialect, chance) for _ in range(count))):
            answer = parse_tool_calls(text, DIALECTS[dialect], list(types), str, types=types)
            assert choice == "auto" or (answer.calls and answer.content is None), text
            assert not answer.is_cut, text
            assert not any(mark in (answer.content or "") for mark in DIALECTS[dialect].markers), text
            for call in answer.calls:
                jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            num_calls += len(answer.calls)
    return num_calls


@each_dialect
def test_what_the_grammar_allows_the_parser_reads(dialect: str) -> None:
    assert num_valid_calls(dialect, 5) > 0


@pytest.mark.slow
@each_dialect
def test_what_the_grammar_allows_the_parser_reads_in_many_answers(dialect: str) -> None:
    assert num_valid_calls(dialect, 100) > 50


def test_tools_that_are_refused() -> None:
    with pytest.raises(GrammarError, match="must be a JSON Schema of an object, but those of 'f' are not"):
        tools_to_structural_tag([Tool("f", None, {"type": "string"})], "auto", DIALECTS["hermes"])


def test_a_name_is_quoted_as_json() -> None:
    machine = tool_machine("hermes", "required", [Tool('a"é\\')])
    assert accepts(machine, '<tool_call>\n{"name": "a\\"é\\\\", "arguments": {}}\n</tool_call>')
