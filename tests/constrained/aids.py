"""What the oracles share: schemas of the public suites, random texts, and `jsonschema` with exact numbers."""

import decimal
import functools
import json
import math
import pathlib
import random
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import jsonschema
from jsonschema.validators import SPECIFICATIONS
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

from jsg.constrained.compiler import compile_tables
from jsg.constrained.run.machine import Machine
from jsg.errors import GrammarError
from jsg.types import GrammarSpec
from tests.constrained import scoreboard
from tests.constrained.vocabularies import DATA

WHITESPACES = ("fixed", "compact", "flexible")
ORDERS = ("declared", "free")


def maskbench(data: pathlib.Path, share: int = 1, start: int = 0) -> list[scoreboard.Case]:
    """Every n-th of the schemas that have instances."""
    return list(scoreboard.maskbench(data))[start::share]


def machine_of(schema: Any, whitespace: str = "fixed", order: str = "declared") -> Machine | None:
    """The machine of a schema; None where it is refused."""
    try:
        spec = GrammarSpec("json_schema", json.dumps(schema), whitespace, order, "open")  # pyright: ignore[reportArgumentType]
        return Machine(compile_tables(spec))
    except GrammarError:
        return None


@functools.cache
def _tekkenizer() -> Tekkenizer:
    return Tekkenizer.from_file(str(DATA / "tekken_240911.json"))


def tekken_encode(text: str) -> list[int]:
    """The tokens in which tekken's own encoder spells a text; ids are those of `vocabularies.tekken`."""
    return _tekkenizer().encode(text, bos=False, eos=False)


# -- Random texts

_MOST_OUTSIDE_STRINGS = 24
"""Bytes that may begin a value or go on after one: a quote, brackets, signs, digits and white space."""


_BEFORE_NAME = re.compile(rb'[{,]\s*"$')


class DeadEnd(AssertionError):
    """A text that was allowed so far can neither end nor go on."""


def required_names(schema: Any) -> list[str]:
    """Names that the schema requires somewhere, as they are written in JSON."""
    found: set[str] = set()
    if isinstance(schema, dict):
        names = schema.get("required")
        if isinstance(names, list):
            found.update(json.dumps(name)[1:] for name in names if isinstance(name, str))
    for part in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        found.update(required_names(part))
    return sorted(found)


def walk(machine: Machine, chance: random.Random, names: list[str], longest: int = 400) -> bytes | None:
    """A random text of the machine; None where it did not end within four times `longest`.

    It is in no hurry at first; later it closes whatever it can close.

    Args:
        machine: Reads it.
        chance: Chooses.
        names: Behind a quote that may begin a name, one of these is tried half of the time; no chance would find them.
        longest: Bytes.

    Raises:
        DeadEnd: No byte may come, and the text may not end.
    """
    config, text = machine.start(), bytearray()
    while len(text) < 4 * longest:
        allowed = sorted(machine.allowed_bytes(config))
        haste = len(text) / longest
        if machine.is_accepting(config) and (not allowed or chance.random() < 0.3 + haste):
            return bytes(text)
        if not allowed:
            raise DeadEnd(bytes(text))
        following = bytes((_choose(allowed, chance, haste),))
        if names and _BEFORE_NAME.search(text[-20:]) and chance.random() < 0.5:
            name = chance.choice(names).encode()
            following = following if machine.advance(config, name) is None else name
        after = machine.advance(config, following)
        assert after is not None, f"{following!r} was said to be allowed"
        config, text = after, text + following
    return None


def _choose(allowed: list[int], chance: random.Random, haste: float) -> int:
    is_text = len(allowed) > _MOST_OUTSIDE_STRINGS
    for few in (b'"',) if is_text else (b"}]", b'"', b",:"):
        closing = [byte for byte in allowed if byte in few]
        if closing and chance.random() < 0.15 + haste:
            return chance.choice(closing)
    flat = [byte for byte in allowed if byte not in b"{[ \\\n"]
    if flat and chance.random() < haste and not is_text:
        return chance.choice(flat)
    plain = [byte for byte in allowed if 0x20 <= byte < 0x7F]
    return chance.choice(plain if plain and chance.random() < 0.85 else allowed)


# -- What is valid


class Judge:
    """`jsonschema` for one schema, with numbers as they are written and patterns as ECMA-262 has them.

    Every text is judged twice: with exact numbers, and as a reader does who knows doubles only.
    """

    def __init__(self, schema: Any, default: type = jsonschema.Draft202012Validator):
        text = json.dumps(python_patterns(schema))
        exact = json.loads(text, parse_float=Decimal)
        kind = jsonschema.validators.validator_for(schema, default=default)
        exactly = jsonschema.validators.extend(kind, type_checker=_exact_types(kind.TYPE_CHECKER))
        given: dict[str, Any] = {"format_checker": _formats(), "registry": SPECIFICATIONS}
        self._exact = exactly(exact, **given)
        # jsonschema divides doubles: 0.3 is no multiple of 0.1 to it.
        self._doubles = None if _has_fraction_step(exact) else kind(json.loads(text), **given)

    def error(self, text: str) -> str | None:
        """Why the text's value is not valid; None where it is.

        Raises:
            ValueError: It is no JSON.
        """
        with decimal.localcontext() as context:
            context.prec = 2000
            found = next(self._exact.iter_errors(json.loads(text, parse_float=Decimal, parse_constant=_refuse)), None)
        if found is None and self._doubles is not None:
            value = json.loads(text)
            if all(map(math.isfinite, _floats(value))):
                found = next(self._doubles.iter_errors(value), None)
        return None if found is None else f"{found.validator}: {found.message}"


def repeats_a_name(text: str) -> bool:
    """Whether an object of the text has two members of one name."""
    found = []

    def see(members: list[tuple[str, Any]]) -> None:
        found.append(len(dict(members)) < len(members))

    json.loads(text, object_pairs_hook=see)
    return any(found)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _floats(value: Any) -> Iterator[float]:
    match value:
        case float():
            yield value
        case list():
            for item in value:
                yield from _floats(item)
        case dict():
            yield from _floats(list(value.values()))


def _has_fraction_step(schema: Any) -> bool:
    if isinstance(schema, dict):
        return isinstance(schema.get("multipleOf"), Decimal) or any(map(_has_fraction_step, schema.values()))
    return isinstance(schema, list) and any(map(_has_fraction_step, schema))


def _exact_types(checker: Any) -> Any:
    def is_number(_: object, value: Any) -> bool:
        return isinstance(value, int | float | Decimal) and not isinstance(value, bool)

    def is_integer(_: object, value: Any) -> bool:
        return is_number(_, value) and value == int(value)

    return checker.redefine_many({"number": is_number, "integer": is_integer})


@functools.cache
def _formats() -> jsonschema.FormatChecker:
    """The formats that jsonschema knows without other packages; its `time` is not the one of today's drafts."""
    return jsonschema.FormatChecker(["date", "email", "ipv4", "ipv6", "uuid"])


def python_patterns(schema: Any) -> Any:
    """The schema with its ECMA-262 patterns written as Python has them.

    Raises:
        re.error: Python has no such thing.
    """
    if isinstance(schema, list):
        return [python_patterns(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {}
    for name, value in schema.items():
        if name == "pattern" and isinstance(value, str):
            value = python_pattern(value)
        elif name == "patternProperties" and isinstance(value, dict):
            value = {python_pattern(pattern): python_patterns(item) for pattern, item in value.items()}
        elif name not in ("enum", "const", "default", "examples"):
            value = python_patterns(value)
        result[name] = value
    return result


_SPACE = "\t\n\v\f\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_PART = re.compile(r"\\c[A-Za-z]|\\u[0-9a-fA-F]{4}|\\[\s\S]|\(\?<(?![=!])|[\s\S]")


def python_pattern(pattern: str) -> str:
    """The pattern in Python's syntax, with ECMA-262's meaning."""
    parts, is_class = [], False
    for part in _PART.findall(pattern):
        if part == r"\s":
            part = _SPACE if is_class else f"[{_SPACE}]"
        elif part == r"\S" and not is_class:
            part = f"[^{_SPACE}]"
        elif part.startswith(r"\c"):
            part = f"\\x{ord(part[2]) % 32:02x}"
        elif part == "(?<":
            part = "(?P<"
        elif is_class:
            part = {"]": "]", "[": r"\["}.get(part, part)
            is_class = part != "]"
        else:
            is_class = part == "["
            part = {"$": r"\Z", ".": "[^\n\r\u2028\u2029]"}.get(part, part)
        parts.append(part)
    found = f"(?a:{''.join(parts)})"
    re.compile(found)
    return found
