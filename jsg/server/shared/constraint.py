"""A grammar in a client's fields."""

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import Field

from jsg.errors import RequestError
from jsg.speech.reply_plan import Constraint
from jsg.types import GRAMMAR_OPTIONS, AdditionalProperties, PropertyOrder, Whitespace

type Schema = dict[str, Any] | bool
# No `type` statements: pydantic would hide the descriptions.
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


def only_one(constraints: Iterable[Constraint]) -> Constraint | None:
    """The grammar of a request, or None if it has none. Raises RequestError if it has several."""
    found = list(constraints)
    if len(found) > 1:
        raise RequestError(
            f"only one grammar may be given, but got {found[0].field} and {found[1].field}; leave one out",
            param=found[1].field,
        )
    return found[0] if found else None


def field_of(constraint: Constraint | None) -> str:
    """The field that brought the grammar of a request: without a grammar of the client's that of its tools."""
    return "tools" if constraint is None else constraint.field


def grammar_options(body: object) -> dict[str, Any]:
    """The options of a grammar that a client gave in fields of these names."""
    given = {name: getattr(body, name, None) for name in GRAMMAR_OPTIONS}
    return {name: value for name, value in given.items() if value is not None}
