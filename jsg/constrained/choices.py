"""Grammars of `choices`: the output is one of a list of texts."""

from jsg.constrained.ir import Grammar, Words
from jsg.constrained.json_input import read_json
from jsg.constrained.limits import LIMITS, Limits, check
from jsg.errors import GrammarError

_PARAM = "choices"


def choices_grammar(text: str, limits: Limits = LIMITS) -> Grammar:
    """The grammar of a JSON list of texts. One may be the beginning of another; equal ones count once.

    Raises:
        GrammarError: The text is no JSON list of texts, or has too many of them.
    """
    choices = read_json(text, _PARAM, limits)
    rule = "a JSON list of one or more texts, none empty"
    if not isinstance(choices, list) or not choices:
        raise GrammarError(f"{_PARAM} must be {rule}, but got {_kind(choices)}; list what may be said", _PARAM)
    check(len(choices), limits.choices, "choices", _PARAM)
    for index, choice in enumerate(choices):
        if not isinstance(choice, str) or not choice:
            raise GrammarError(f"{_PARAM} must be {rule}, but number {index} is {_kind(choice)}; correct it", _PARAM)
    try:
        words = sorted({choice.encode() for choice in choices})
    except UnicodeEncodeError:
        raise GrammarError(
            f"{_PARAM} must be Unicode text, but one has a lone surrogate; leave it out", _PARAM
        ) from None
    return Grammar("choices", {"choices": Words(tuple(words))})


def _kind(value: object) -> str:
    """The kind of a JSON value, in words."""
    if isinstance(value, list | dict | str) and not value:
        return f"an empty {'list' if isinstance(value, list) else 'object' if isinstance(value, dict) else 'text'}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {list: "a list", dict: "an object", str: "a text", int: "a number", float: "a number"}
    return names[type(value)]
