"""A grammar in a client's fields → fields of `SamplingParams`."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, final

from pydantic import Field

from jsg.errors import RequestError
from jsg.speech.rules.thought_grammar import format_of
from jsg.speech.rules.tool_use import Choice, Speech, TextForm, Tool, ToolUse
from jsg.types import GRAMMAR_OPTIONS, AdditionalProperties, GrammarKind, PropertyOrder, Whitespace

type Schema = dict[str, Any] | bool
# No `type` statements: pydantic would hide the descriptions behind the names.
WhitespaceOption = Annotated[
    Whitespace | None, Field(description="The white space in the JSON of a schema; see `sampling_params`.")
]
PropertyOrderOption = Annotated[
    PropertyOrder | None,
    Field(description="The order of the members of objects of a schema; see `sampling_params`."),
]
AdditionalPropertiesOption = Annotated[
    AdditionalProperties | None,
    Field(description="Whether objects may have members that a schema does not declare; see `sampling_params`."),
]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar, and the field in which the client wrote it.

    Attributes:
        field: The client's name of the field.
        kind: The kind of grammar.
        value: The grammar's text, or its value if the client wrote it as JSON.
    """

    field: str
    kind: GrammarKind
    value: Any


def only_one(constraints: Iterable[Constraint]) -> Constraint | None:
    """The grammar of a request, or None if it has none. Raises RequestError if it has several."""
    found = list(constraints)
    if len(found) > 1:
        raise RequestError(
            f"only one grammar may be given, but got {found[0].field} and {found[1].field}; leave one out",
            param=found[1].field,
        )
    return found[0] if found else None


def text_form(constraint: Constraint | None, tools: Sequence[Tool], choice: Choice, speech: Speech) -> TextForm | None:
    """The form of a text beside which calls of tools may stand, or in front of which a header stands.

    Raises:
        RequestError: The grammar is none that anything can stand beside.
    """
    has_header = speech.dialect is not None and speech.dialect.messages is not None
    may_call = bool(tools) and choice.mode != "none"
    if constraint is None or choice.mode == "required" or not (may_call or has_header):
        return None
    value = constraint.value
    if isinstance(value, str) and constraint.kind not in ("regex", "ebnf"):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RequestError(f"{constraint.field} must be JSON: {error}", constraint.field) from None
    return TextForm(constraint.field, format_of(constraint.kind, value, constraint.field))


def grammar_options(body: object) -> dict[str, Any]:
    """The options of a grammar that a client gave in fields of these names."""
    given = {name: getattr(body, name) for name in GRAMMAR_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}


def grammar_fields(
    constraint: Constraint | None, tools: ToolUse | None, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of `SamplingParams` for an answer that matches a grammar or may call tools.

    Args:
        constraint: The grammar of the whole answer.
        tools: The tools that the answer may call; they know the grammar as the form of a text.
        options: The options that the client gave, for the grammar or the tools.
    """
    options = dict(options or {})
    if tools is None:
        return options if constraint is None else {constraint.kind: constraint.value, **options}
    grammar = tools.grammar()
    fields = options if grammar is None else {"grammar": dataclasses.replace(grammar, **options)}
    return fields | ({"skip_special_tokens": False} if tools.has_special_marks else {})
