"""`sampling_params` of `/generate` → `SamplingParams`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jsg.errors import RequestError
from jsg.server.http.body import is_off
from jsg.types import GRAMMAR_FIELDS, SamplingParams

Object = dict[str, Any]

REFUSED_SAMPLING: Mapping[str, str] = {
    "grammar": f"use the field for its kind: {', '.join(GRAMMAR_FIELDS)}",
    "custom_params": "it is for logit processors of clients, and the server never runs code of clients; leave it out",
}
"""Sampling parameter of SGLang that is refused → why. Null, false and empty values are taken as absent."""

ACCEPTED_SAMPLING: Mapping[str, str] = {
    "spaces_between_special_tokens": "a text has only the characters of its tokens, as with every fast tokenizer",
    "stream_interval": "only 1 is taken; an event has all tokens since the last one, so slow readers get fewer events",
}
"""Sampling parameter that clients send and that changes nothing here → why this is right."""

_TAKEN: Mapping[str, tuple[object, ...]] = {"spaces_between_special_tokens": (True, False), "stream_interval": (1,)}
"""Parameter of `ACCEPTED_SAMPLING` → the values that are taken."""


def to_samplings(given: Object | list[Object] | None, prompt_lens: Sequence[int], limit: int) -> list[SamplingParams]:
    """The sampling parameters of each prompt.

    Where the client gives no `max_new_tokens`, it is the default, or the room that is left after the prompt.

    Args:
        given: The parameters for all prompts, or a list with the parameters of each.
        prompt_lens: The number of tokens of each prompt.
        limit: Most tokens of prompt and output together.

    Raises:
        RequestError: A parameter is unknown, refused or out of range, or the list is of another length.
    """
    usual = SamplingParams().max_new_tokens
    made: dict[tuple[int, int], SamplingParams] = {}  # a thousand prompts with one set of parameters check it once
    samplings = []
    for fields, prompt_len in zip(one_each("sampling_params", given, len(prompt_lens), {}), prompt_lens, strict=True):
        default = max(1, min(usual, limit - prompt_len))
        key = (id(fields), default)
        if key not in made:
            made[key] = _to_sampling(fields, default)
        samplings.append(made[key])
    return samplings


def one_each(name: str, value: Any, count: int, default: Any) -> list[Any]:
    """One value for each of `count` prompts. A list has a value for each; another value is for all; null is `default`.

    Raises:
        RequestError: A list of another length.
    """
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count:
        raise RequestError(
            f"{name} must have one item for each of the {count} prompts, but has {len(values)}; correct it", name
        )
    return [default if item is None else item for item in values]


def _to_sampling(fields: Object, default_max_new_tokens: int) -> SamplingParams:
    given = {
        name: value
        for name, value in fields.items()
        if value is not None and not (name in REFUSED_SAMPLING and is_off(value))
    }
    for name in given:
        if name in REFUSED_SAMPLING:
            raise RequestError(f"{name} is not supported: {REFUSED_SAMPLING[name]}", param=name)
    for name in ACCEPTED_SAMPLING.keys() & given.keys():
        value = given.pop(name)
        if not any(type(value) is type(taken) and value == taken for taken in _TAKEN[name]):
            rule = " or ".join(json.dumps(taken) for taken in _TAKEN[name])
            raise RequestError(f"{name} must be {rule}, but got {repr(value)[:100]}; leave it out", param=name)
    return SamplingParams.from_dict({"max_new_tokens": default_max_new_tokens} | given)
