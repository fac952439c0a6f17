"""Makes the structural tag that lets a model call tools, in the form that it was trained on and in no other."""

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from jsg.errors import GrammarError
from jsg.types import AdditionalProperties, GrammarSpec, PropertyOrder, Whitespace

Dialect = Literal["llama3_json", "hermes", "mistral"]
Format = dict[str, Any]

_PARAM = "tools"


@dataclasses.dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Its name.
        parameters: JSON Schema of its arguments, which are an object; None takes any object.
        is_strict: Whether a schema that cannot be enforced is an error; otherwise the arguments are then any object.
    """

    name: str
    parameters: Mapping[str, Any] | bool | None = None
    is_strict: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of one tool, which the model must call."""

    name: str


ToolChoice = Literal["auto", "required", "none"] | NamedTool


def tools_to_structural_tag(
    tools: Sequence[Tool],
    tool_choice: ToolChoice,
    dialect: Dialect,
    *,
    parallel: bool = True,
    special_tokens: Collection[str] = (),
    form: Format | None = None,
    whitespace: Whitespace = "fixed",
    property_order: PropertyOrder = "declared",
    additional_properties: AdditionalProperties = "closed",
) -> GrammarSpec | None:
    """The grammar of an answer that may, or must, call tools; None where it may not call any.

    With "auto" the answer is free text with calls in it, and whatever begins like a call must be one. With "required"
    it is calls and nothing else, at least one; with a named tool exactly one call of that. If the text of an answer
    must have a form, "auto" means calls and nothing else, or the form and nothing else.

    Args:
        tools: The tools that may be called.
        tool_choice: The choice of the client.
        dialect: How the model writes a call.
        parallel: An answer may have several calls; after the only one nothing follows.
        special_tokens: Written forms of the tokenizer's special tokens. A marker of the dialect that is among them
            stands as a special token, not as text.
        form: The form of an answer without calls, as a format of a structural tag; None for free text.
        whitespace: The whitespace in the arguments.
        property_order: The order of the properties in the arguments.
        additional_properties: Whether arguments may have members that no schema declares; see `GrammarSpec`.

    Raises:
        GrammarError: The named tool is not among the tools, two have one name, or arguments could not be an object.
    """
    _check_names(tools, tool_choice)
    if tool_choice == "none" or not tools:
        return None
    if isinstance(tool_choice, NamedTool):
        tools = [tool for tool in tools if tool.name == tool_choice.name]
        parallel = False
    special = frozenset(special_tokens)
    make = {"hermes": _hermes, "mistral": _mistral, "llama3_json": _llama3}[dialect]
    is_auto = tool_choice == "auto"
    answer = make(tools, is_auto and form is None, parallel, special)
    if is_auto and form is not None:
        answer = {"type": "or", "elements": [answer, form]}
    tag = {"type": "structural_tag", "format": answer}
    text = json.dumps(tag, ensure_ascii=False)
    return GrammarSpec("structural_tag", text, whitespace, property_order, additional_properties)


def _marker(text: str, special: Collection[str]) -> str | Format:
    """How a tag names a marker of a dialect: as a special token where it is one."""
    return {"type": "token", "token": text} if text in special else text


def _spellings(text: str, special: Collection[str]) -> list[str | Format]:
    """All spellings that look like a marker: as plain characters, and as a special token where it is one."""
    return [text, _marker(text, special)] if text in special else [text]


def _hermes(tools: Sequence[Tool], is_auto: bool, parallel: bool, special: Collection[str]) -> Format:
    def tag(tool: Tool, begin: str | Format, end: str | Format | list[str | Format]) -> Format:
        head, body, tail = _call(tool, "arguments")
        content = _sequence(_text("\n" + head), body, _text(tail + "\n"))
        return {"type": "tag", "begin": begin, "content": content, "end": end}

    opening, closing = "<tool_call>", "</tool_call>"
    if is_auto:
        triggers = _spellings(opening, special)
        ends = _spellings(closing, special)
        return _triggered(triggers, [tag(tool, begin, ends) for tool in tools for begin in triggers], parallel)
    tags = [tag(tool, _marker(opening, special), _marker(closing, special)) for tool in tools]
    return _list(tags, "\n", parallel)


def _mistral(tools: Sequence[Tool], is_auto: bool, parallel: bool, special: Collection[str]) -> Format:
    calls = _list([_plain_tag(tool, "arguments") for tool in tools], ", ", parallel)
    content = _sequence(_text("["), calls, _text("]"))
    opening = "[TOOL_CALLS]"
    if is_auto:
        triggers = _spellings(opening, special)
        tags = [{"type": "tag", "begin": begin, "content": content, "end": ""} for begin in triggers]
        return _triggered(triggers, tags, parallel=False)
    return {"type": "tag", "begin": _marker(opening, special), "content": content, "end": ""}


def _llama3(tools: Sequence[Tool], is_auto: bool, parallel: bool, special: Collection[str]) -> Format:
    tags = [_plain_tag(tool, "parameters") for tool in tools]
    calls = _list([*tags], "; ", parallel)
    opening = "<|python_tag|>"
    if not is_auto:
        optional_tag = {"type": "optional", "content": {"type": "token", "token": opening}}
        return _sequence(optional_tag, calls) if opening in special else calls
    triggers: list[str | Format] = ['{"name"']
    if opening in special:
        triggers.append(_marker(opening, special))
        tags.append({"type": "tag", "begin": _marker(opening, special), "content": calls, "end": ""})
    # A reader of the answer takes these, too, for the beginning of a call.
    excludes = [opening, '{"type": "function"']
    return _triggered(triggers, tags, parallel) | {"excludes": excludes}


def _call(tool: Tool, arguments: str) -> tuple[str, Format, str]:
    """The text before the arguments of a call, their format, and the text after them."""
    head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
    body: Format = {"type": "json_schema", "json_schema": _object_schema(tool)}
    return head, body if tool.is_strict else body | {"or_any_object": True}, "}"


def _plain_tag(tool: Tool, arguments: str) -> Format:
    head, body, tail = _call(tool, arguments)
    return {"type": "tag", "begin": head, "content": body, "end": tail}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}


def _list(tags: list[Format], separator: str, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _triggered(triggers: list[str | Format], tags: list[Format], parallel: bool) -> Format:
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": not parallel}


def _object_schema(tool: Tool) -> Mapping[str, Any]:
    """The schema of a tool's arguments. They are an object, even where the schema does not say so."""
    schema = tool.parameters
    if schema is None or schema is True:
        return {"type": "object"}
    if isinstance(schema, Mapping):
        kind = schema.get("type", "object")
        if kind == "object" or (isinstance(kind, list) and "object" in kind):
            return {**schema, "type": "object"}
    if not tool.is_strict:
        return {"type": "object"}
    raise GrammarError(
        f"the parameters of a tool must be a JSON Schema of an object, but those of {tool.name[:60]!r} are not; "
        'give them "type": "object"',
        _PARAM,
    )


def _check_names(tools: Sequence[Tool], tool_choice: ToolChoice) -> None:
    names = [tool.name for tool in tools]
    if len(set(names)) != len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise GrammarError(f"each tool must have its own name, but two are called {twice[:60]!r}; rename one", _PARAM)
    if isinstance(tool_choice, NamedTool) and tool_choice.name not in names:
        raise GrammarError(
            f"tool_choice must name one of the tools, but got {tool_choice.name[:60]!r}; name one of "
            f"{', '.join(names)[:200] or 'them (there are none)'}",
            "tool_choice",
        )
    if tool_choice == "required" and not tools:
        raise GrammarError("tool_choice required needs tools, but there are none; send some", "tool_choice")
