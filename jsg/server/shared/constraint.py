"""A grammar in a client's fields → fields of `SamplingParams`."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, final

from pydantic import Field

from jsg.errors import RequestError
from jsg.server.tool_use import ToolUse
from jsg.types import GrammarKind, PropertyOrder, Whitespace

type Schema = dict[str, Any] | bool
# No `type` statements: pydantic would hide the descriptions behind the names.
WhitespaceOption = Annotated[
    Whitespace | None, Field(description="The white space in the JSON of a schema; see `sampling_params` below.")
]
PropertyOrderOption = Annotated[
    PropertyOrder | None,
    Field(description="The order of the members of objects of a schema; see `sampling_params` below."),
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


def grammar_fields(
    constraint: Constraint | None, tools: ToolUse | None, options: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The fields of `SamplingParams` for an answer that matches a grammar or may call tools.

    Args:
        constraint: The grammar of the whole answer.
        tools: The tools that the answer may call.
        options: `whitespace` and `property_order`, for the grammar or the tools.

    Raises:
        RequestError: A grammar and tools are given.
    """
    options = {name: value for name, value in (options or {}).items() if value is not None}
    if tools is not None:
        if constraint is not None:
            raise RequestError(
                f"only one grammar may be given, but {constraint.field} is one and the tools are another; leave one "
                'out, or set tool_choice to "none"',
                param=constraint.field,
            )
        grammar = {"grammar": dataclasses.replace(tools.grammar(), **options)}
        return grammar | ({"skip_special_tokens": False} if tools.has_special_marks else {})
    return options if constraint is None else {constraint.kind: constraint.value, **options}
