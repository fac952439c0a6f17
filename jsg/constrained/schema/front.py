"""Makes a grammar of a JSON Schema."""

import dataclasses
import decimal
from collections.abc import Collection

from jsg.constrained.call_styles import ArgumentTypes, CallStyle
from jsg.constrained.ir import Grammar
from jsg.constrained.json_input import read_json
from jsg.constrained.limits import LIMITS, Limits
from jsg.constrained.schema.arguments import CallForm
from jsg.constrained.schema.emit import emit
from jsg.constrained.schema.normalise import no_value, normalise
from jsg.constrained.schema.values import EXACT
from jsg.types import AdditionalProperties, PropertyOrder, Whitespace


def schema_grammar(
    text: str,
    whitespace: Whitespace = "fixed",
    property_order: PropertyOrder = "declared",
    additional_properties: AdditionalProperties = "open",
    limits: Limits = LIMITS,
    style: CallStyle | None = None,
    special: Collection[str] = (),
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
        style: The texts are the arguments of a call in this style, without its head and its end, and not JSON. What a
            reader takes them for is then valid for the schema.
        special: The special tokens among the style's marks, or in them.

    Raises:
        GrammarError: The text is not a schema, or the schema has a keyword that cannot be enforced, allows no value,
            or is too large.
    """
    schema = read_json(text, "json_schema", limits, is_exact=True)
    form = None
    if style is not None:
        form = CallForm(style, special, ArgumentTypes.read(schema if isinstance(schema, dict) else None))
        whitespace = "compact" if style in ("gemma", "function_gemma") else whitespace
    with decimal.localcontext(EXACT):
        document = normalise(schema, limits, additional_properties)
        grammar = emit(document, whitespace, property_order, limits, form)
    # Some contradictions, such as a format beside a length, show only when all rules are built. `contradiction` is the
    # message for them.
    keywords = schema if isinstance(schema, dict) else ()
    return dataclasses.replace(grammar, contradiction=no_value("#", keywords), annotations=document.annotations)
