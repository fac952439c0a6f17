"""The fields in which clients of OpenAI, SGLang and vLLM give a grammar → the one grammar of a request."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import FailFast, Field, StringConstraints, model_validator

from jsg.errors import RequestError
from jsg.server.http.body import Body, Checked, check_fields
from jsg.server.shared.constraint import (
    AdditionalPropertiesOption,
    PropertyOrderOption,
    Schema,
    WhitespaceOption,
    grammar_options,
    only_one,
)
from jsg.speech.reply_plan import Constraint
from jsg.types import ANY_OBJECT, GRAMMAR_FIELDS, AdditionalProperties, GrammarKind

GRAMMARS: Mapping[str, GrammarKind] = {
    **{name: name for name in GRAMMAR_FIELDS},
    **{"guided_regex": "regex", "guided_json": "json_schema", "guided_grammar": "ebnf", "guided_choice": "choices"},
}
"""Field that has a grammar and nothing else → the kind of grammar."""

type SchemaName = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]
type Choices = Annotated[list[str], FailFast(), Field(min_length=1)]

OWN_WHITESPACE = "use whitespace, which is fixed, compact or flexible"
CHOICES = "A list of texts. The answer is one of them."
SCHEMA = "A JSON Schema, which the text of the answer matches."
FORMAT_TYPE = '"text" allows any answer, "json_object" any JSON object, "json_schema" the JSON of a schema.'

ENFORCED = "the schema is always enforced"
NOT_SHOWN = "the model does not see the name and the description of a schema; tell the model in a message"


class JsonSchemaFormat(Body):
    """A JSON Schema and its name."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {"name": NOT_SHOWN, "description": NOT_SHOWN, "strict": ENFORCED}

    name: SchemaName
    schema_: Schema = Field(alias="schema", description=SCHEMA)
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = Field(
        description=f'{FORMAT_TYPE} "structural_tag" is free text with parts that match grammars.'
    )
    json_schema: JsonSchemaFormat | None = Field(None, description="The schema, for the type `json_schema`.")
    structures: Checked[dict[str, Any]] | None = Field(
        None, description="The structures of a structural tag in its older form."
    )
    triggers: Checked[str] | None = Field(None, description="The triggers of a structural tag in its older form.")
    format: dict[str, Any] | None = Field(None, description="The format of a structural tag in its newer form.")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        tag = "structures? triggers? format?"
        kinds = {"text": "", "json_object": "", "json_schema": "json_schema", "structural_tag": tag}
        check_fields(self, self.type, f"response_format of type {self.type}", "response_format", kinds)
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
    """One grammar, in the form of vLLM."""

    REFUSED: ClassVar[Mapping[str, str]] = {"whitespace_pattern": OWN_WHITESPACE}
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "disable_any_whitespace": "`whitespace` says how JSON is written, and its default allows one form only",
        "disable_fallback": "there is only one grammar backend, so there is no fallback",
    }

    json_: Schema | str | None = Field(None, alias="json", description="A JSON Schema, or its text.")
    regex: str | None = Field(None, description="A regular expression that the whole answer matches.")
    choice: Choices | None = Field(None, description=CHOICES)
    grammar: str | None = Field(None, description="An EBNF grammar, in the dialect of `ebnf`.")
    json_object: bool | None = Field(None, description="If it is true, the answer is any JSON object.")
    structural_tag: str | dict[str, Any] | None = Field(
        None, description="A structural tag, as a JSON value or as its text."
    )
    disable_additional_properties: bool | None = Field(
        None, description="True is `additional_properties` of `closed`, the default, and false is `open`."
    )
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None

    @property
    def additional_properties(self) -> AdditionalProperties | None:
        """What the client says about undeclared members of objects, if its grammar has a schema."""
        if self.disable_additional_properties is None or (self.json_ is None and self.structural_tag is None):
            return None
        return "closed" if self.disable_additional_properties else "open"

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


class GrammarFields(Body):
    """The fields of a body that may have one grammar. Fields that OpenAI lacks come from SGLang and vLLM."""

    REFUSED: ClassVar[Mapping[str, str]] = {"guided_whitespace_pattern": OWN_WHITESPACE}

    response_format: ResponseFormat | None = Field(
        None, description="The form of the answer. A request has at most one grammar."
    )
    regex: str | None = Field(None, description="From SGLang. A regular expression that the whole answer matches.")
    json_schema: Schema | str | None = Field(None, description="From SGLang. A JSON Schema, or its text.")
    ebnf: str | None = Field(
        None, description="From SGLang. An EBNF grammar, whose rule `root` matches the whole answer."
    )
    choices: Choices | None = Field(None, description=CHOICES)
    structural_tag: str | dict[str, Any] | None = Field(
        None, description="From SGLang. A structural tag, as a JSON value or as its text."
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="From vLLM. One grammar.")
    guided_json: Schema | str | None = Field(None, description="From vLLM. The older name of `json_schema`.")
    guided_regex: str | None = Field(None, description="From vLLM. The older name of `regex`.")
    guided_choice: Choices | None = Field(None, description="From vLLM. The older name of `choices`.")
    guided_grammar: str | None = Field(None, description="From vLLM. The older name of `ebnf`.")
    whitespace: WhitespaceOption = None
    property_order: PropertyOrderOption = None
    additional_properties: AdditionalPropertiesOption = None

    def constraint(self) -> Constraint | None:
        """The grammar that the answer must match. Raises RequestError if several are given."""
        return only_one(self._constraints())

    def _constraints(self) -> Iterator[Constraint]:
        for given in (self.response_format, self.structured_outputs):
            if given is not None:
                yield from given.constraints()
        for name, kind in GRAMMARS.items():
            if (value := getattr(self, name)) is not None:
                yield Constraint(name, kind, value)

    def grammar_options(self) -> dict[str, Any]:
        """The options that the client gave. Raises RequestError if two contradict each other."""
        options, name = grammar_options(self), "additional_properties"
        said = None if self.structured_outputs is None else self.structured_outputs.additional_properties
        if said is not None and options.setdefault(name, said) != said:
            raise RequestError(
                f"{name} must not contradict disable_additional_properties, but it is {options[name]}; leave one out",
                name,
            )
        return options
