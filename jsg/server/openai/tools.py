"""Tools as clients of chat completions write them, and calls as those clients read them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from jsg.errors import RequestError
from jsg.processing.tool_calls import CallDelta, ToolCall
from jsg.server.http.body import Body, Checked
from jsg.server.tool_use import Choice, Tool

FUNCTIONS_ONLY = "only functions can be called; write it as a function"
STRICT = "False: the arguments of a call are any JSON object. Otherwise they match `parameters`."

type ToolName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: ToolName
    description: str | None = Field(None, description="Shown to the model.")
    parameters: dict[str, Any] | None = Field(
        None, description="A JSON Schema of the arguments, shown to the model; absent is no arguments."
    )
    strict: bool | None = Field(None, description=STRICT)

    def tool(self, field: str) -> Tool:
        """The same for every API; it stands in that field."""
        return Tool(self.name, self.description, self.parameters, f"{field}.parameters", self.strict is not False)


class ChatTool(Body):
    """An item of `tools`."""

    REFUSED: ClassVar[Mapping[str, str]] = {"custom": FUNCTIONS_ONLY}

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Body):
    """The name of one of the functions."""

    name: str


class ToolReference(Body):
    """The name of one of the tools."""

    REFUSED: ClassVar[Mapping[str, str]] = {"custom": FUNCTIONS_ONLY}

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """Some of the tools, and whether to call any."""

    mode: Literal["auto", "required"]
    tools: Annotated[Checked[ToolReference], Field(min_length=1)]


class ToolChoice(Body):
    """Which tools to call."""

    REFUSED: ClassVar[Mapping[str, str]] = {"custom": FUNCTIONS_ONLY}

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = Field(None, description="The one that is called, once.")
    allowed_tools: AllowedTools | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        given = {name for name in ("function", "allowed_tools") if getattr(self, name) is not None}
        if given != {self.type}:
            raise RequestError(f"tool_choice of type {self.type} must have {self.type} and nothing else", "tool_choice")
        return self

    def choice(self) -> Choice:
        """The same for every API."""
        if self.function is not None:
            return Choice("required", (self.function.name,), is_one_call=True)
        assert self.allowed_tools is not None
        return Choice(self.allowed_tools.mode, tuple(tool.function.name for tool in self.allowed_tools.tools))


def shown_call(call: ToolCall) -> dict[str, Any]:
    """A call of a whole answer."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def shown_change(change: CallDelta) -> dict[str, Any]:
    """A piece of a call: the first names it, and all bring some of its arguments."""
    if change.name is None:
        return {"index": change.index, "function": {"arguments": change.arguments}}
    function = {"name": change.name, "arguments": change.arguments}
    return {"index": change.index, "id": change.id, "type": "function", "function": function}
