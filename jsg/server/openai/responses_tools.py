"""The tools of `/v1/responses`: functions, custom tools and namespaces, each of which the model sees as functions."""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, final

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from jsg.constrained.ebnf.lark import lark_pattern, regex_pattern
from jsg.errors import GrammarError, RequestError
from jsg.server.http.body import Body, Checked, check_fields
from jsg.server.http.field_rules import FieldRules
from jsg.server.shared.fields import Only
from jsg.server.shared.harmless import LEFT_OUT, VALUES
from jsg.server.shared.tools import DESCRIPTION, PARAMETERS, STRICT, ToolName
from jsg.speech.rules.tool_use import MAX_TOOLS, Choice, Tool

NO_HOSTED_TOOLS = "the server runs no tools, and the model calls functions of the client only; leave it out"
INPUT = "input"
"""The one argument of the function as which the model sees a custom tool."""

_BETWEEN = "__"
_TYPE_ALLOWED = "For the type `allowed_tools`: "
_SEES_ALL = "the model sees every tool; leave it out"
_SYNTAXES = {"lark": ("Lark grammar", lark_pattern), "regex": ("regular expression", regex_pattern)}


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """The tool of a client that stands for a function as the model sees it.

    Attributes:
        name: Its name.
        namespace: The namespace in which it has this name; None for none.
        is_custom: Whether its input is a text, and not the arguments of a function.
    """

    name: str
    namespace: str | None = None
    is_custom: bool = False


def flat_name(name: str, namespace: str | None) -> str:
    """The name by which the model calls a tool of a namespace."""
    return name if namespace is None else f"{namespace.removesuffix(_BETWEEN)}{_BETWEEN}{name}"


def without_left_out(items: Any, info: ValidationInfo) -> Any:
    """The items without those of types that are left out, each of which brings a warning."""
    if not isinstance(items, list):
        return items
    kept: list[Any] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind in LEFT_OUT:
            FieldRules.of(info.context).pass_over(f"an item of type {kind}", LEFT_OUT[kind])
        else:
            kept.append(item)
    return kept


class CustomFormat(Body):
    """The form of the input of a custom tool."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = Field(None, description="For the type `grammar`: its notation.")
    definition: str | None = Field(
        None,
        description="For the type `grammar`: what the whole input matches. It is enforced if it is a regular "
        "language. A Lark grammar in which a rule calls itself, or with `%ignore`, is only shown to the model, with a "
        "warning.",
    )
    _pattern: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_type(self, info: ValidationInfo) -> Self:
        kinds = {"text": "", "grammar": "syntax definition"}
        check_fields(self, self.type, f"a format of type {self.type}", "tools", kinds)
        if self.syntax is not None:
            try:
                self._pattern = _SYNTAXES[self.syntax][1](self.definition or "")
            except GrammarError as error:
                reason = f"{error}; the model sees it, and its input may be any text"
                FieldRules.of(info.context).pass_over("a format of a custom tool", reason)
        return self

    @property
    def schema_of_input(self) -> dict[str, Any]:
        """The JSON Schema of the input."""
        if self.syntax is None:
            return {"type": "string"}
        shown = f"It matches this {_SYNTAXES[self.syntax][0]}:\n{self.definition}"
        return {"type": "string", "description": shown} | ({"pattern": self._pattern} if self._pattern else {})


class NamespacedTool(Body):
    """A function that the model may call, or a custom tool, which is a function with one text."""

    REFUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("output_schema", "async", "server_label", "vector_store_ids", "container", "environment"), NO_HOSTED_TOOLS
    )
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "allowed_callers": 'only `["direct"]` is taken, because only the model calls tools',
        "defer_loading": "the model sees every tool; true brings a warning",
    }
    KINDS: ClassVar[Mapping[str, str]] = {
        "function": "name description? parameters? strict?",
        "custom": "name description? format?",
    }

    type: Annotated[Any, Only(("function", "custom"), NO_HOSTED_TOOLS, takes_null=False)]
    name: ToolName
    description: str | None = Field(None, description=DESCRIPTION)
    parameters: dict[str, Any] | None = Field(None, description=f"For the type `function`: {PARAMETERS}")
    strict: bool | None = Field(None, description=f"For the type `function`: {STRICT}")
    format: CustomFormat | None = Field(None, description="For the type `custom`: the form of its input.")
    allowed_callers: Annotated[Any, Only((["direct"],), NO_HOSTED_TOOLS)] = None
    defer_loading: Annotated[Any, Only((False,), _SEES_ALL, VALUES["defer_loading"])] = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        check_fields(self, self.type, f"a tool of type {self.type}", "tools", self.KINDS)
        return self

    def tool(self, field: str, namespace: "ResponsesTool | None" = None) -> tuple[Origin, Tool]:
        """Where it comes from, and the tool in the form that every API shares. `field` is where the client wrote it."""
        origin = Origin(self.name, None if namespace is None else namespace.name, self.type == "custom")
        name, description = flat_name(self.name, origin.namespace), self.description
        if namespace is not None and namespace.description:
            description = f"{namespace.description}\n\n{description or ''}".strip()
        if not origin.is_custom:
            field = f"{field}.parameters"
            return origin, Tool(name, description, self.parameters, field, self.strict is not False)
        text = {"type": "string"} if self.format is None else self.format.schema_of_input
        schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}
        return origin, Tool(name, description, schema, f"{field}.format")

    def shown(self) -> dict[str, Any]:
        """The fields of the tool that a response repeats."""
        shown = self.model_dump(include={"type", "name", "description"})
        if self.type == "custom":
            return shown | ({} if self.format is None else {"format": self.format.model_dump(exclude_none=True)})
        return shown | {"parameters": self.parameters, "strict": self.strict is not False}


class ResponsesTool(NamespacedTool):
    """A function or a custom tool that the model may call, or a namespace of such tools."""

    KINDS: ClassVar[Mapping[str, str]] = {**NamespacedTool.KINDS, "namespace": "name description? tools"}

    type: Annotated[Any, Only(("function", "custom", "namespace"), NO_HOSTED_TOOLS, takes_null=False)]
    tools: Annotated[Checked[NamespacedTool], Field(min_length=1, max_length=MAX_TOOLS)] | None = Field(
        None,
        description="For the type `namespace`: its tools. The model calls the tool `b` of the namespace `a` as `a__b`, "
        "and sees the description of the namespace before that of the tool.",
    )

    def all_tools(self, field: str) -> Iterator[tuple[Origin, Tool]]:
        """As `tool`, for itself or for the tools of the namespace."""
        if self.tools is None:
            yield self.tool(field)
        for index, each in enumerate(self.tools or ()):
            yield each.tool(f"{field}.tools[{index}]", self)

    def shown(self) -> dict[str, Any]:
        """The fields of the tool that a response repeats."""
        if self.tools is None:
            return super().shown()
        names = {"type": self.type, "name": self.name, "description": self.description or ""}
        return names | {"tools": [each.shown() for each in self.tools]}


class ResponsesToolName(Body):
    """The name of a tool."""

    type: Annotated[Any, Only(("function", "custom"), NO_HOSTED_TOOLS, takes_null=False)]
    name: str


class ResponsesToolChoice(Body):
    """The choice of the tools that the answer may call."""

    type: Literal["function", "custom", "allowed_tools"]
    name: str | None = Field(
        None,
        description="For the types `function` and `custom`: the tool that the answer calls, once. One of a namespace "
        "may be named as the model calls it.",
    )
    mode: Literal["auto", "required"] | None = Field(
        None,
        description=f'{_TYPE_ALLOWED}with "auto" the answer is text or calls, with "required" it has a call or more.',
    )
    tools: Annotated[Checked[ResponsesToolName], Field(min_length=1)] | None = Field(
        None, description=f"{_TYPE_ALLOWED}the tools that the answer may call."
    )

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any, info: ValidationInfo) -> Any:
        return {**data, "tools": without_left_out(data["tools"], info)} if _has_list(data, "tools") else data

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        kinds = {"function": "name", "custom": "name", "allowed_tools": "mode tools"}
        check_fields(self, self.type, f"tool_choice of type {self.type}", "tool_choice", kinds)
        return self

    def choice(self, origins: Mapping[str, Origin]) -> Choice:
        """The choice in the form that every API shares, among tools as the model sees them."""
        if self.name is not None:
            return Choice("required", (_called(self.name, origins),), is_one_call=True)
        return Choice(self.mode or "auto", tuple(_called(tool.name, origins) for tool in self.tools or ()))


def _called(name: str, origins: Mapping[str, Origin]) -> str:
    """The name by which the model calls a tool that the client names: in full, or as the only one of its name."""
    found = [flat for flat, origin in origins.items() if origin.name == name]
    return found[0] if name not in origins and len(found) == 1 else name


def _has_list(data: Any, name: str) -> bool:
    return isinstance(data, dict) and isinstance(data.get(name), list)


def origins_of(tools: Sequence[ResponsesTool]) -> tuple[dict[str, Origin], list[Tool]]:
    """Name by which the model calls a tool → the client's tool; and the tools. Raises RequestError for equal names."""
    origins: dict[str, Origin] = {}
    found: list[Tool] = []
    for index, tool in enumerate(tools):
        for origin, each in tool.all_tools(f"tools[{index}]"):
            if each.name in origins and origin != origins[each.name]:
                raise RequestError(
                    f"each of the tools must have its own name, but two are called as {each.name!r}; rename one",
                    "tools",
                )
            origins[each.name] = origin
            found.append(each)
    return origins, found


@final
class InputReader:
    """Reads the text of a custom tool's input from the arguments of a call, while they come.

    Invariant: `_held` is shorter than a part of the head or a pair of escapes.
    """

    _HEAD = ("{", f'"{INPUT}"', ":", '"')
    # Half of a surrogate pair is held until the character behind it says that the other half does not come.
    _CHARS = re.compile(
        r'(?:[^"\\]|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}'
        r"(?:\\u[0-9a-fA-F]{4}|(?=[^\\]|\\[^u])))*"
    )

    def __init__(self) -> None:
        self._head = list(reversed(self._HEAD))  # what is still to come before the text
        self._held = ""
        self._is_over = False

    def push(self, arguments: str) -> str:
        """Takes a piece of the arguments. Returns the characters of the input that are complete."""
        if self._is_over:
            return ""
        self._held += arguments
        while self._head:
            self._held = self._held.lstrip()
            if not self._held.startswith(self._head[-1]):
                self._is_over = not self._head[-1].startswith(self._held)
                return ""
            self._held = self._held.removeprefix(self._head.pop())
        match = self._CHARS.match(self._held)
        assert match is not None, "it may match nothing"
        self._held = self._held[match.end() :]
        self._is_over = self._held.startswith('"')
        text: str = json.loads(f'"{match[0]}"', strict=False)
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def input_of(arguments: str) -> str:
    """The input of a custom tool in the arguments of a whole call."""
    return InputReader().push(arguments)


def arguments_of(text: str) -> str:
    """The arguments of a call of a custom tool with this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
