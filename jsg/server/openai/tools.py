"""The choice of tools in chat completions, and the form in which they show calls."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from jsg.server.http.body import Body, Checked, check_fields
from jsg.server.shared.tools import FUNCTIONS_ONLY
from jsg.speech.answers.tool_calls import CallDelta, ToolCall
from jsg.speech.rules.tool_use import Choice


class NamedFunction(Body):
    """The name of a function."""

    name: str = Field(description="The name of one of the functions that the request describes.")


class ToolReference(Body):
    """The name of a tool."""

    REFUSED: ClassVar[Mapping[str, str]] = {"custom": FUNCTIONS_ONLY}

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Body):
    """The tools that may be called, and whether one must be called."""

    mode: Literal["auto", "required"] = Field(
        description='With "auto" the answer is text or calls. With "required" it has at least one call.'
    )
    tools: Annotated[Checked[ToolReference], Field(min_length=1)] = Field(
        description="The tools that may be called. The model sees the other tools but cannot call them."
    )


class ToolChoice(Body):
    """The choice of the tools that the answer may call."""

    REFUSED: ClassVar[Mapping[str, str]] = {"custom": FUNCTIONS_ONLY}

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = Field(
        None, description="For the type `function`: the function that the answer calls, once."
    )
    allowed_tools: AllowedTools | None = Field(
        None, description="For the type `allowed_tools`: the tools that the answer may call."
    )

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        kinds = {"function": "function", "allowed_tools": "allowed_tools"}
        check_fields(self, self.type, f"tool_choice of type {self.type}", "tool_choice", kinds)
        return self

    def choice(self) -> Choice:
        """The choice in the form that every API shares."""
        if self.function is not None:
            return Choice("required", (self.function.name,), is_one_call=True)
        assert self.allowed_tools is not None
        return Choice(self.allowed_tools.mode, tuple(tool.function.name for tool in self.allowed_tools.tools))


def shown_call(call: ToolCall) -> dict[str, Any]:
    """A call of a whole answer."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def shown_change(change: CallDelta) -> dict[str, Any]:
    """A piece of a call. The first piece has its name; each has some of its arguments."""
    if change.name is None:
        return {"index": change.index, "function": {"arguments": change.arguments}}
    function = {"name": change.name, "arguments": change.arguments}
    return {"index": change.index, "id": change.id, "type": "function", "function": function}
