"""The fields in which OpenAI's, SGLang's and vLLM's clients give a grammar → the one grammar of a request."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, StringConstraints, model_validator

from jsg.errors import RequestError
from jsg.server.http.body import Body, Checked
from jsg.server.shared.constraint import Constraint, Schema
from jsg.types import GrammarKind

type SchemaName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
type Choices = Annotated[list[str], FailFast(), Field(min_length=1)]

OWN_WHITESPACE = "send whitespace: fixed, compact or flexible"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

ENFORCED = "the schema is enforced as it is, whatever is said here"
NOT_SHOWN = "only the schema counts: the model is shown neither; say what it should know in a message"


class JsonSchemaFormat(Body):
    """`response_format.json_schema`."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {"name": NOT_SHOWN, "description": NOT_SHOWN, "strict": ENFORCED}

    name: SchemaName
    schema_: Schema = Field(alias="schema", description="A JSON Schema, which the answer's text will match.")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description='"text" is anything, "json_object" any JSON object.'
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="With the type of this name.")
    structures: Checked[dict[str, Any]] | None = Field(None, description="Of a structural tag in its older form.")
    triggers: Checked[str] | None = Field(None, description="Of a structural tag in its older form.")
    format: dict[str, Any] | None = Field(None, description="Of a structural tag in its newer form.")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        parts = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers", "format")}
        for name in ("json_schema", "structures", "triggers", "format"):
            if getattr(self, name) is not None and name not in parts.get(self.type, ()):
                raise RequestError(f"response_format of type {self.type} must not have {name}", "response_format")
        if self.type == "json_schema" and self.json_schema is None:
            raise RequestError("response_format of type json_schema must have json_schema", "response_format")
        return self

    def constraints(self) -> Iterator[Constraint]:
        """Its grammar, if its type has one."""
        match self.type:
            case "text":
                return
            case "json_object":
                yield Constraint("response_format", "json_schema", ANY_OBJECT)
            case "json_schema":
                assert self.json_schema is not None
                yield Constraint("response_format", "json_schema", self.json_schema.schema_)
            case "structural_tag":
                yield Constraint("response_format", "structural_tag", self.model_dump(exclude_none=True))


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`: one grammar."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "whitespace_pattern": OWN_WHITESPACE,
        "disable_additional_properties": "say it in the schema: additionalProperties",
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "disable_any_whitespace": "what `whitespace` is unless it is sent",
        "disable_fallback": "there is one engine for grammars, and nothing to fall back to",
    }

    json_: Schema | str | None = Field(None, alias="json", description="A JSON Schema.")
    regex: str | None = None
    choice: Choices | None = Field(None, description="Texts, of which the answer is one.")
    grammar: str | None = Field(None, description="In the dialect of `ebnf`.")
    json_object: bool | None = Field(None, description="Any JSON object.")
    structural_tag: str | dict[str, Any] | None = Field(None, description="JSON, or the value itself.")
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None

    def constraints(self) -> Iterator[Constraint]:
        """All grammars that it has."""
        given: dict[str, tuple[GrammarKind, Any]] = {
            "json": ("json_schema", self.json_),
            "regex": ("regex", self.regex),
            "choice": ("choices", self.choice),
            "grammar": ("ebnf", self.grammar),
            "json_object": ("json_schema", ANY_OBJECT if self.json_object else None),
            "structural_tag": ("structural_tag", self.structural_tag),
        }
        for name, (kind, value) in given.items():
            if value is not None:
                yield Constraint(f"structured_outputs.{name}", kind, value)
