"""Makes a grammar of a JSON Schema."""

import dataclasses

from jsg.constrained.ir import Grammar
from jsg.constrained.json_input import read_json
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.schema.emit import emit
from jsg.constrained.schema.normalise import no_value, normalise
from jsg.types import PropertyOrder, Whitespace


def schema_grammar(
    text: str, whitespace: Whitespace = "fixed", property_order: PropertyOrder = "declared", limits: Limits = LIMITS
) -> Grammar:
    """The grammar of the JSON texts whose value is valid for a schema.

    Its `annotations` list what the standard calls an annotation and a grammar does not enforce, one line each, such as
    "format 'colour' at #/properties/a/format": unknown formats and keywords, `contentEncoding` and its like, and an
    unknown `$schema`. Titles, descriptions, defaults and examples are left out, because nobody takes them for rules.
    Parts of the schema that nothing refers to are not read.

    Args:
        text: The schema as JSON; `true` and `false` are schemas too.
        whitespace: White space between the tokens of a text.
        property_order: Order of the members of objects in a text.
        limits: Limits of the work.

    Raises:
        GrammarError: The schema is no schema, uses what cannot be enforced, is valid for nothing, or is too large.
    """
    schema = read_json(text, "json_schema", limits)
    document = normalise(schema, limits)
    grammar = emit(document, whitespace, property_order, limits)
    # Some contradictions, such as a format beside a length, show only when all rules are built. This is their message.
    keywords = schema if isinstance(schema, dict) else ()
    return dataclasses.replace(grammar, contradiction=no_value("#", keywords), annotations=document.annotations)
