"""Tools as OpenAI's clients write them, and the descriptions of tools that every API shares."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from jsg.server.http.body import Body
from jsg.speech.rules.tool_use import Tool

FUNCTIONS_ONLY = "only functions can be called; describe the tool as a function"
DESCRIPTION = "A description, which is shown to the model."
STRICT = "If it is false, `parameters` that cannot be enforced are no error: the arguments are then any JSON object."
PARAMETERS = "A JSON Schema of the arguments, which is shown to the model. Without it a call has no arguments."
TOOLS = "The tools that the answer may call, for a model that was trained to call tools."
TOOL_CHOICE = 'With "auto", the default, the answer is text or calls. With "required" it has at least one call.'
ONE_CALL = "If it is false, an answer has at most one call."

type ToolName = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[a-zA-Z0-9_.-]+$")]


class FunctionDefinition(Body):
    """A function that the model may call."""

    name: ToolName
    description: str | None = Field(None, description=DESCRIPTION)
    parameters: dict[str, Any] | None = Field(None, description=PARAMETERS)
    strict: bool | None = Field(None, description=STRICT)

    def tool(self, field: str) -> Tool:
        """The tool in the form that every API shares. `field` is where the client wrote it."""
        return Tool(self.name, self.description, self.parameters, f"{field}.parameters", self.strict is not False)


class ChatTool(Body):
    """An item of `tools`."""

    REFUSED: ClassVar[Mapping[str, str]] = {"custom": FUNCTIONS_ONLY}

    type: Literal["function"]
    function: FunctionDefinition
