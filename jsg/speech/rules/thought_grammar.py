"""Puts the thoughts of a model in front of a grammar, which then governs what follows them."""

import dataclasses
import json
import re
from collections.abc import Collection, Mapping
from typing import Any

from jsg.constrained.special_tokens import special_bytes
from jsg.speech.answers.thoughts import MARKER_TOKENS, Markers
from jsg.types import GRAMMAR_FIELDS, GRAMMAR_OPTIONS, GrammarSpec, SamplingParams

Format = dict[str, Any]

_FREE = ("any_text", "triggered_tags", "token_triggered_tags", "dispatch")


def after_thoughts(
    grammar: GrammarSpec | None,
    markers: Markers,
    *,
    is_inside: bool,
    special_tokens: Collection[str],
    is_sure: bool = True,
) -> GrammarSpec:
    """The grammar of an output that begins with thoughts, which are free text, and goes on with a text of `grammar`.

    Args:
        grammar: The grammar of the answer; None where the answer may have any tokens.
        markers: What encloses the thoughts. White space may come before the first one; without it the output has none.
            Their gap is left out if the answer may begin with any text.
        is_inside: Whether the prompt has opened the thoughts, so that they are not optional and have no `begin`.
        special_tokens: Written forms of the tokenizer's special tokens. A marker, or a part of one, that is among them
            is written as a special token.
        is_sure: Whether the model has these special tokens. Otherwise each may be written as text, too.
    """

    def parts(text: str) -> list[Format]:
        return _parts(text, special_tokens, is_sure=is_sure)

    first, *others = parts(markers.end)
    choices = first["elements"] if first["type"] == "or" else [first]
    close = [each["value"] if each["type"] == "const_string" else each for each in choices]
    is_free = grammar is None or is_free_text(grammar)
    thoughts = [
        {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": close},
        *others,
        *([] if is_free else parts(markers.gap)),
    ]
    if is_inside:
        lead = _sequence(thoughts)
    else:
        thoughts = _sequence([{"type": "regex", "pattern": r"[ \t\r\n]{0,4}"}, *parts(markers.begin), *thoughts])
        without = [] if is_free else parts(markers.header)
        either = {"type": "or", "elements": [thoughts, _sequence(without)]}
        lead = either if without else {"type": "optional", "content": thoughts}
    answer: Format = {"type": "any_text", "special_tokens": True}
    if grammar is not None:
        answer = {"type": "whole", "kind": grammar.kind, "text": grammar.text}
    tag = {"type": "structural_tag", "format": _sequence([lead, answer])}
    text = json.dumps(tag, ensure_ascii=False)
    if grammar is None:
        return GrammarSpec("structural_tag", text)
    return dataclasses.replace(grammar, kind="structural_tag", text=text, field=grammar.field or grammar.kind)


def behind_thoughts(sampling: Mapping[str, Any], markers: Markers) -> dict[str, Any]:
    """The fields of `SamplingParams` of an output that may begin with thoughts, made of the fields of its answer.

    It is for programs, which name the markers and know neither the model nor where its prompt ends. Special tokens stay
    in the text, because the markers may be some.
    """
    names = (*GRAMMAR_FIELDS, *GRAMMAR_OPTIONS)
    others = {"skip_special_tokens": False} | {name: sampling[name] for name in sampling if name not in names}
    grammar = SamplingParams.from_dict({name: sampling[name] for name in names if name in sampling}).grammar
    if not isinstance(grammar, GrammarSpec):
        return others
    is_inside = markers.starts_inside
    whole = after_thoughts(grammar, markers, is_inside=is_inside, special_tokens=MARKER_TOKENS, is_sure=False)
    return others | {name: sampling[name] for name in GRAMMAR_OPTIONS if name in sampling} | {whole.kind: whole.text}


def is_free_text(grammar: GrammarSpec) -> bool:
    """Whether a grammar begins with any text: it has places in free text that it governs."""
    if grammar.kind != "structural_tag":
        return False
    try:
        tag = json.loads(grammar.text)
    except (ValueError, RecursionError):
        return False
    form = tag.get("format") if isinstance(tag, dict) else None
    if not isinstance(form, dict):
        return isinstance(tag, dict) and "structures" in tag
    return form.get("type") in _FREE and not form.get("at_least_one")


def marker_bytes(marker: str, special_tokens: Collection[str]) -> bytes:
    """A marker as a grammar reads it, with its special tokens."""
    parts = _parts(marker, special_tokens, is_sure=True)
    return b"".join(
        part["value"].encode() if part["type"] == "const_string" else special_bytes(part["token"]) for part in parts
    )


def _sequence(elements: list[Format]) -> Format:
    return {"type": "sequence", "elements": elements}


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
