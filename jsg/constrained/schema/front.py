"""Makes a grammar of a JSON Schema."""

import dataclasses

from jsg.constrained.ir import Grammar
from jsg.constrained.json_input import read_json
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.schema.emit import emit
from jsg.constrained.schema.normalise import no_value, normalise
from jsg.types import AdditionalProperties, PropertyOrder, Whitespace


def schema_grammar(
    text: str,
    whitespace: Whitespace = "fixed",
    property_order: PropertyOrder = "declared",
    additional_properties: AdditionalProperties = "open",
    limits: Limits = LIMITS,
) -> Grammar:
    """The grammar of the JSON texts whose value is valid for a schema.

    The grammar's `annotations` list what the standard calls an annotation and the grammar does not enforce: unknown
    formats and keywords, `contentEncoding` and similar keywords, and an unknown `$schema`. Each has one line, such as
    "format 'colour' at #/properties/a/format". Titles, descriptions, defaults and examples are left out, because nobody
    takes them for rules. Parts of the schema that nothing refers to are not read.

    Args:
        text: The schema as JSON; `true` and `false` are schemas too.
        whitespace: White space between the tokens of a text.
        property_order: Order of the members of objects in a text.
        additional_properties: With "closed", an object has no undeclared members unless something in the schema says
            that it may or must have some. So a text is valid in any case, but some valid texts are not in the grammar.
        limits: Limits of the work.

    Raises:
        GrammarError: The text is not a schema, or the schema has a keyword that cannot be enforced, allows no value,
            or is too large.
    """
    schema = read_json(text, "json_schema", limits)
    document = normalise(schema, limits, additional_properties)
    grammar = emit(document, whitespace, property_order, limits)
    # Some contradictions, such as a format beside a length, show only when all rules are built. `contradiction` is the
    # message for them.
    keywords = schema if isinstance(schema, dict) else ()
    return dataclasses.replace(grammar, contradiction=no_value("#", keywords), annotations=document.annotations)
