"""Random tools with random arguments, and their calls as the chat templates of models write earlier calls."""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from jsg.constrained.call_styles import LITERAL_MARKS, XML_MARKS, ArgumentTypes, CallStyle, json_of
from jsg.speech.answers.call_reader import CallReader
from jsg.speech.answers.json_scanner import ScanStep
from jsg.speech.dialects import DIALECTS

NAMES = ("text", "n", "a-b", "path.to", "größe", "_x1")
_PIECES = (
    *("a", "word", "Zoë", "日本", "😀", " ", "\n", "\n\n", '"', "'", "\\", "\\n", "\\u00e9", "\t", "\r", "\x01", "12"),
    *("true", "None", "{", "}", "[", "]", "(", ")", "=", ":", ",", "<", ">", "|", "</", "<|", "</parameter", "<escap"),
    *("<parameter=x>", "</function>", "<tool_call>", "</tool_call>", "<arg_key>", '<|"', "call:f{", "f(a=1)", "e" * 40),
)
Value = Any


class Tool(NamedTuple):
    """The schema of a tool's arguments, and arguments that are valid for it."""

    schema: dict[str, Any]
    arguments: dict[str, Value]


def forbidden_in_strings(style: CallStyle) -> str | None:
    """The mark that no string can have in it; None where every string can be written."""
    return XML_MARKS[style].value[1] if style in XML_MARKS else LITERAL_MARKS[style].quote


def random_tool(style: CallStyle, chance: random.Random) -> Tool:
    """A tool whose arguments the style can write."""
    properties, arguments, required = {}, {}, []
    for name in chance.sample(NAMES, chance.randint(0, len(NAMES))):
        properties[name], sample = chance.choice(_KINDS)
        if is_required := chance.random() < 0.6:
            required.append(name)
        if is_required or chance.random() < 0.5:
            arguments[name] = sample(
                _Sampler(style, chance, ArgumentTypes.read({"properties": properties} | _DEFS).of(name))
            )
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return Tool(schema | _DEFS, arguments)


class _Sampler:
    def __init__(self, style: CallStyle, chance: random.Random, types: frozenset[str]):
        self.chance = chance
        self._style: CallStyle = style
        self._types = types

    def text(self, types: frozenset[str] = frozenset()) -> str:
        """A string that can be written, and that is read as one where it may also be of these types."""
        mark = forbidden_in_strings(self._style)
        while True:
            text = "".join(self.chance.choice(_PIECES) for _ in range(self.chance.choice((0, 1, 3, 12))))
            if (mark is None or mark not in text) and (types <= {"string"} or json_of(text, types) is None):
                return text

    def quoted(self) -> str:
        """A string inside of other values."""
        is_raw = self._style in ("gemma", "function_gemma")
        return (
            self.text() if is_raw or self.chance.random() < 0.8 else f"{forbidden_in_strings(self._style)}{self.text()}"
        )

    def argument(self) -> str:
        """A string that stands for itself as an argument."""
        return self.text(self._types if self._style in ("qwen_xml", "glm_xml", "minimax_xml") else frozenset())

    def value(self, depth: int = 0) -> Value:
        """Any value; strings in it have quotes or marks of their own."""
        scalars = (None, True, False, 0, -7, 2.5, 1e-9, 12345678901234567890, self.quoted())
        if depth > 2 or self.chance.random() < 0.5:
            return self.chance.choice(scalars)
        values = [self.value(depth + 1) for _ in range(self.chance.randint(0, 3))]
        return values if self.chance.random() < 0.5 else dict(zip(NAMES, values, strict=False))


_DEFS = {"$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}}
_KINDS: tuple[tuple[dict[str, Any], Callable[[_Sampler], Value]], ...] = (
    ({"type": "string"}, lambda s: s.argument()),
    ({"type": "string"}, lambda s: s.argument()),
    (
        {"type": "string", "minLength": 1, "maxLength": 3},
        lambda s: s.chance.choice(("a", "\n", "<", "12", "<|é", '"\\')),
    ),
    ({"type": "string", "pattern": "^[a-z</>]+$"}, lambda s: s.chance.choice(("abc", "</", "a<b>"))),
    ({"enum": ["red", "light blue", "1"], "type": "string"}, lambda s: s.chance.choice(("red", "light blue", "1"))),
    ({"type": "string", "format": "date"}, lambda _: "2026-11-28"),
    ({"type": ["string", "null"]}, lambda s: s.chance.choice((None, s.argument()))),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, lambda s: s.chance.choice((5, s.argument()))),
    ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, lambda s: s.chance.choice((None, "a", "b"))),
    ({"type": "integer", "minimum": 3}, lambda s: s.chance.randint(3, 10**6)),
    ({"type": "number"}, lambda s: s.chance.choice((1, -2.5, 1e-9, 1e30))),
    ({"type": "boolean"}, lambda s: s.chance.random() < 0.5),
    ({"type": "null"}, lambda _: None),
    ({"enum": [1, 2.5, None, "x"]}, lambda s: s.chance.choice((1, 2.5, None, "x"))),
    ({"type": "array", "items": {"type": "string"}}, lambda s: [s.quoted() for _ in range(s.chance.randint(0, 3))]),
    (
        {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 2},
        lambda s: [{"x": 1.5}] * s.chance.randint(0, 2),
    ),
    ({"$ref": "#/$defs/point"}, lambda s: {"x": s.chance.choice((0, -1.25))}),
    ({"type": "array"}, lambda s: [s.value() for _ in range(s.chance.randint(0, 2))]),
    (
        {
            "type": "object",
            "properties": {"k": {"type": ["string", "boolean"]}, "l": {"type": "array"}},
            "required": ["k"],
        },
        lambda s: {"k": s.chance.choice((True, s.quoted())), "l": [s.value()]},
    ),
)


def written(style: CallStyle, arguments: Mapping[str, Value], chance: random.Random) -> str:
    """A call of the tool `f`. Where published templates differ in it, chance decides."""
    if style not in XML_MARKS:
        return _literal_call(style, arguments)
    json_ = _with_python_words if style == "qwen_xml" and chance.random() < 0.5 else _json
    if style == "qwen_xml":
        members = (f"<parameter={k}>\n{_or_text(v, json_)}\n</parameter>\n" for k, v in arguments.items())
        return f"<function=f>\n{''.join(members)}</function>"
    if style == "glm_xml":
        gap = chance.choice(("", "\n"))
        members = (
            f"<arg_key>{k}</arg_key>{gap}<arg_value>{_or_text(v, json_)}</arg_value>{gap}" for k, v in arguments.items()
        )
        return f"f{gap}{''.join(members)}</tool_call>"
    if style == "minimax_xml":
        members = (f'<parameter name="{k}">{_or_text(v, json_)}</parameter>\n' for k, v in arguments.items())
        return f'<invoke name="f">\n{"".join(members)}</invoke>'
    members = (
        f'<｜DSML｜parameter name="{k}" string="{_json(isinstance(v, str))}">{_or_text(v, json_)}</｜DSML｜parameter>\n'
        for k, v in arguments.items()
    )
    return f'<｜DSML｜invoke name="f">\n{"".join(members)}</｜DSML｜invoke>'


def _or_text(value: Value, json_: Callable[[Value], str]) -> str:
    return value if isinstance(value, str) else json_(value)


def _json(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_python_words(value: Value) -> str:
    return _json(value) if isinstance(value, list | dict) else str(value)


def _literal_call(style: CallStyle, arguments: Mapping[str, Value]) -> str:
    if style == "python":
        return f"f({', '.join(f'{k}={_python(v)}' for k, v in arguments.items())})"
    quote = LITERAL_MARKS[style].quote or ""
    return f"call:f{_gemma(arguments, quote)}"


def _python(value: Value) -> str:
    match value:
        case list():
            return f"[{', '.join(map(_python, value))}]"
        case dict():
            return f"{{{', '.join(f'{_json(k)}: {_python(v)}' for k, v in value.items())}}}"
        case str():
            return _json(value)
        case _:
            return str(value)


def _gemma(value: Value, quote: str) -> str:
    match value:
        case str():
            return quote + value + quote
        case Mapping():
            members = sorted(value.items(), key=lambda item: item[0].lower())
            return f"{{{','.join(f'{k}:{_gemma(v, quote)}' for k, v in members)}}}"
        case list():
            return f"[{','.join(_gemma(item, quote) for item in value)}]"
        case bool():
            return _json(value)
        case _:
            return str(value)


def reader(style: CallStyle, schema: Mapping[str, Any] | None = None) -> CallReader:
    """A reader of a call of `f` or `g`, which have this schema."""
    types = ArgumentTypes.read(schema)
    dialect = dataclasses.replace(DIALECTS["hermes"], style=style)
    return CallReader(dialect, frozenset(("f", "g")), {"f": types, "g": types})


def fragments(reader_: CallReader, pieces: list[str]) -> Iterator[str]:
    """What the reader gives after each piece of a text that is a whole call."""
    steps = [ScanStep.INSIDE]
    for piece in pieces:
        for char in piece:
            assert steps[-1] is ScanStep.INSIDE, (steps[-1], "".join(pieces), reader_.text)
            steps.append(reader_.push(char))
        yield reader_.take_fragment()
    assert steps[-1] is ScanStep.LAST, ("".join(pieces), reader_.text)


def json_read(style: CallStyle, schema: Mapping[str, Any] | None, text: str) -> str:
    """The arguments that a reader finds in a whole call."""
    return "".join(fragments(reader(style, schema), [text]))
