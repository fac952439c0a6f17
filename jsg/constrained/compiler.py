"""Compiles a grammar as a client wrote it to tables, and to a grammar that is ready for a model."""

import logging

from jsg.constrained.build.builder import build
from jsg.constrained.grammar import CompiledGrammar
from jsg.constrained.ir import Grammar
from jsg.constrained.limits import LIMITS, Limits, check
from jsg.constrained.run.vocab import Vocabulary
from jsg.constrained.tables import StaticTables
from jsg.errors import GrammarError
from jsg.types import GrammarSpec

logger = logging.getLogger(__name__)


def compile_tables(spec: GrammarSpec, limits: Limits = LIMITS) -> StaticTables:
    """The tables of a grammar, which need no vocabulary and can be sent to another process.

    Raises:
        GrammarError: The grammar is wrong, uses something that is not supported, or would cost more than `limits`.
    """
    try:
        check(len(spec.text.encode()), limits.text_bytes, "bytes of text")
        grammar = _read(spec, limits.metered())
        if grammar.annotations:
            logger.debug("%s: not enforced: %a", spec.kind, grammar.annotations)
        return build(grammar, limits)
    except GrammarError as error:
        if error.param is None:  # no part of the grammar is at fault
            raise GrammarError(error.message, spec.kind, spec.field) from error
        raise
    except RecursionError:
        message = "a grammar must not be nested so deeply that it cannot be read; nest less"
        raise GrammarError(message, spec.kind, spec.field) from None
    except MemoryError:
        message = "a grammar must fit in memory when compiled, but there is too little; simplify it"
        raise GrammarError(message, spec.kind, spec.field) from None


def annotations(spec: GrammarSpec) -> tuple[str, ...]:
    """What the schemas of a grammar have in them that is not enforced, with its place; see `schema_grammar`.

    Raises:
        GrammarError: The grammar is refused before anything is built; see `compile_tables`.
    """
    return _read(spec, LIMITS.metered()).annotations


def warm() -> None:
    """Compiles a grammar of each kind, so that the first of a client waits for no import and no table of characters."""
    for spec in (
        GrammarSpec("regex", r"[\w\d\s]+|\p{L}|(?i:s)"),
        GrammarSpec(
            "json_schema", '{"properties": {"a": {"pattern": "^\\\\w+$", "maxLength": 9}, "b": {"minimum": 1}}}'
        ),
        GrammarSpec("ebnf", 'root ::= [^a] "x"*'),
        GrammarSpec("choices", '["a"]'),
        GrammarSpec("structural_tag", '{"type": "structural_tag", "format": {"type": "any_text"}}'),
    ):
        compile_tables(spec)


def compile_grammar(spec: GrammarSpec, vocabulary: Vocabulary, limits: Limits = LIMITS) -> CompiledGrammar:
    """The grammar, ready for a model with this vocabulary; see `compile_tables` for what it raises."""
    return CompiledGrammar(compile_tables(spec, limits), vocabulary, limits)


def _read(spec: GrammarSpec, limits: Limits) -> Grammar:
    """Reads the grammar. The code for each kind is imported when it is used, because some of it needs a library."""
    match spec.kind:
        case "regex":
            from jsg.constrained.regex.parse import regex_grammar

            return regex_grammar(spec.text, limits=limits)
        case "json_schema":
            from jsg.constrained.schema.front import schema_grammar

            return schema_grammar(
                spec.text, spec.whitespace, spec.property_order, spec.additional_properties, limits=limits
            )
        case "ebnf":
            from jsg.constrained.ebnf.parser import ebnf_grammar

            return ebnf_grammar(spec.text, limits=limits)
        case "choices":
            from jsg.constrained.choices import choices_grammar

            return choices_grammar(spec.text, limits=limits)
        case "structural_tag":
            from jsg.constrained.tags.front import structural_tag_grammar

            return structural_tag_grammar(
                spec.text,
                limits=limits,
                whitespace=spec.whitespace,
                property_order=spec.property_order,
                additional_properties=spec.additional_properties,
            )
