"""Puts the thoughts of a model in front of a grammar, which then governs what follows them."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from jsg.constrained.special_tokens import special_bytes
from jsg.errors import GrammarError
from jsg.types import GrammarKind, GrammarSpec

Format = dict[str, Any]

_INSIDE = re.compile(r"the structural tag\.format\.elements\[1\](: |\.|\[)", re.DOTALL)


def after_thoughts(
    grammar: GrammarSpec | None,
    begin: str,
    end: str,
    gap: str,
    *,
    is_inside: bool,
    special_tokens: Collection[str],
    is_sure: bool = True,
) -> GrammarSpec:
    """The grammar of an output that begins with thoughts, which are free text, and goes on with a text of `grammar`.

    Args:
        grammar: The grammar of the answer; None where the answer is free text, too.
        begin: The marker that opens the thoughts. Without it the output has none.
        end: The marker that closes them.
        gap: The text between `end` and the answer.
        is_inside: Whether the prompt has opened the thoughts, so that they are not optional and have no `begin`.
        special_tokens: Written forms of the tokenizer's special tokens. A marker, or a part of one, that is among them
            stands as a special token.
        is_sure: Whether the model has these special tokens. Otherwise each may stand as text, too.

    Raises:
        GrammarError: The grammar is no JSON, although its kind says so.
    """
    first, *others = _parts(end, special_tokens, is_sure=is_sure)
    choices = first["elements"] if first["type"] == "or" else [first]
    close = [each["value"] if each["type"] == "const_string" else each for each in choices]
    thoughts: Format = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": close}
    parts = [thoughts, *others, *(_parts(gap, special_tokens, is_sure=is_sure) if gap and grammar is not None else ())]
    if not is_inside:
        parts = [*_parts(begin, special_tokens, is_sure=is_sure), *parts]
    lead: Format = {"type": "sequence", "elements": parts}
    lead = lead if is_inside else {"type": "optional", "content": lead}
    answer = {"type": "any_text"} if grammar is None else format_of(grammar.kind, _value(grammar), grammar.kind)
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": [lead, answer]}}
    text = json.dumps(tag, ensure_ascii=False)
    if grammar is None:
        return GrammarSpec("structural_tag", text)
    return dataclasses.replace(grammar, kind="structural_tag", text=text)


@contextlib.contextmanager
def without_thoughts(kind: GrammarKind | None) -> Iterator[None]:
    """A GrammarError about a grammar of `after_thoughts`, raised inside, speaks of the grammar that it was made of.

    `kind` is the kind of that one; None where there are no thoughts before it.
    """
    try:
        yield
    except GrammarError as error:
        found = None if kind is None else _INSIDE.match(str(error))
        if found is not None and kind == "structural_tag":
            error.args = (f"the structural tag.format{str(error)[found.start(1) :]}",)
        elif found is not None and found[1] == ": ":
            error.args, error.param = (str(error)[found.end() :],), kind
        raise


def marker_bytes(marker: str, special_tokens: Collection[str]) -> bytes:
    """A marker as a grammar reads it, with its special tokens."""
    parts = _parts(marker, special_tokens, is_sure=True)
    return b"".join(
        part["value"].encode() if part["type"] == "const_string" else special_bytes(part["token"]) for part in parts
    )


def format_of(kind: str, value: Any, field: str) -> Format:
    """A grammar as a format of a structural tag.

    Args:
        kind: Its kind, one of `GRAMMAR_FIELDS`.
        value: Its text where it is a regular expression or EBNF, otherwise its JSON value.
        field: The field in which the client wrote it, for errors.
    """
    match kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": value}
        case "regex":
            return {"type": "regex", "pattern": value}
        case "ebnf":
            return {"type": "grammar", "grammar": value}
        case "choices":
            return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in value]}
        case _:
            return _format_of_tag(value, field)


def _format_of_tag(tag: Any, field: str) -> Format:
    """The format of a structural tag of either form."""
    if isinstance(tag, dict) and isinstance(tag.get("format"), dict):
        return tag["format"]
    structures = tag.get("structures") if isinstance(tag, dict) else None
    if not isinstance(structures, list) or not all(isinstance(each, dict) for each in structures):
        raise GrammarError(f"{field} must have a format or structures, but has neither; add one", field)
    tags = [
        {
            "type": "tag",
            "begin": each.get("begin", ""),
            "content": {"type": "json_schema", "json_schema": each.get("schema", True)},
            "end": each.get("end", ""),
        }
        for each in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers", []), "tags": tags}


def _value(grammar: GrammarSpec) -> Any:
    if grammar.kind in ("regex", "ebnf"):
        return grammar.text
    try:
        return json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"{grammar.kind} must be JSON: {error}", grammar.kind) from None


def _parts(marker: str, special_tokens: Collection[str], *, is_sure: bool) -> list[Format]:
    """A marker as formats: texts, and special tokens."""
    names = sorted((name for name in special_tokens if name in marker), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, names))})", marker) if names else [marker]
    return [_special(piece, is_sure=is_sure) if piece in names else _text(piece) for piece in pieces if piece]


def _special(name: str, *, is_sure: bool) -> Format:
    token = {"type": "token", "token": name}
    return token if is_sure else {"type": "or", "elements": [_text(name), token | {"if_known": True}]}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}
