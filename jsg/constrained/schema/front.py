"""Makes a grammar of a JSON Schema."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jsg.constrained.ir import Grammar
from jsg.constrained.json_input import read_json
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.schema.emit import emit
from jsg.constrained.schema.normalise import no_value, normalise
from jsg.errors import GrammarError
from jsg.types import PropertyOrder, Whitespace

_PARAM = "json_schema"


def schema_grammar(
    text: str, whitespace: Whitespace = "fixed", property_order: PropertyOrder = "declared", limits: Limits = LIMITS
) -> Grammar:
    """The grammar of the JSON texts whose value is valid for a schema.

    Its `annotations` are what stands in the schema and is not enforced, for the standard calls it an annotation, one
    line each, such as "format 'colour' at #/properties/a/format": formats and keywords that the standard does not know,
    `contentEncoding` and its like, and a `$schema` that is not known. Titles, descriptions, defaults and examples are
    left out: nobody takes them for rules. Parts of the schema that nothing refers to are not looked at.

    Args:
        text: The schema as JSON; `true` and `false` are schemas too.
        whitespace: Between the tokens of a text.
        property_order: Of the members of objects in a text.
        limits: Fuel.

    Raises:
        GrammarError: The schema is no schema, uses what cannot be enforced, is valid for nothing, or is too large.
    """
    with _naming():
        schema = read_json(text, _PARAM, limits)
        document = normalise(schema, limits)
        grammar = emit(document, whitespace, property_order, limits)
    # What contradicts itself as texts only, a format and a length for example, is found out when all rules are there.
    keywords = schema if isinstance(schema, dict) else ()
    return dataclasses.replace(grammar, contradiction=no_value("#", keywords), annotations=document.annotations)


@contextlib.contextmanager
def _naming() -> Iterator[None]:
    """Errors inside say which parameter is wrong."""
    try:
        yield
    except GrammarError as error:
        if error.param is not None:
            raise
        raise GrammarError(str(error), param=_PARAM) from error
