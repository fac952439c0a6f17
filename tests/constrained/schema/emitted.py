"""Schemas as machines, and random texts that a machine takes, for tests of the emitter."""

import functools
import json
import random
from collections.abc import Iterator

from jsg.constrained.run.machine import Config, Machine
from jsg.constrained.schema.front import schema_grammar
from tests.constrained import texts

_CLOSING = b'"}],'
_LONGEST = 400


@functools.lru_cache(maxsize=256)
def _machine(text: str, whitespace: str, order: str) -> Machine:
    return texts.machine_of(schema_grammar(text, whitespace, order))  # pyright: ignore[reportArgumentType]


def machine(schema: object, whitespace: str = "fixed", order: str = "declared") -> Machine:
    return _machine(json.dumps(schema), whitespace, order)


def accepts(schema: object, text: str, whitespace: str = "fixed", order: str = "declared") -> bool:
    return texts.accepts(machine(schema, whitespace, order), text)


def verdicts(schema: object, values: list[str], **options: str) -> list[str]:
    """The texts that the schema's grammar accepts."""
    return [text for text in values if accepts(schema, text, **options)]


def forced(schema: object, beginning: str, **options: str) -> str:
    """The forced bytes after a text."""
    automaton = machine(schema, **options)
    config = automaton.advance(automaton.start(), beginning.encode())
    assert config is not None, beginning
    return automaton.forced_run(config, 200).decode()


def walk(automaton: Machine, seed: int) -> str | None:
    """A random text that the machine takes; None where it did not come to an end."""
    choose = random.Random(seed)
    config = automaton.start()
    data = bytearray()
    while len(data) < _LONGEST:
        if automaton.is_accepting(config) and (choose.random() < 0.4 or not automaton.can_continue(config)):
            return data.decode()
        byte = _next_byte(automaton, config, choose, len(data))
        following = automaton.advance(config, bytes([byte]))
        assert following is not None, (bytes(data), byte)
        config = following
        data.append(byte)
    return None


def _next_byte(automaton: Machine, config: Config, choose: random.Random, length: int) -> int:
    """A byte that may come next. No text may lead to where there is none."""
    allowed = sorted(automaton.allowed_bytes(config))
    assert allowed, "a dead end"
    closing = [byte for byte in allowed if byte in _CLOSING]
    if closing and choose.random() < min(0.9, 0.2 + length / 100):
        return choose.choice(closing[:-1] if length > 200 and len(closing) > 1 else closing)
    plain = [byte for byte in allowed if 0x20 <= byte < 0x7F]
    return choose.choice(plain if plain and choose.random() < 0.8 else allowed)


def walks(automaton: Machine, count: int, seed: int = 0) -> Iterator[str]:
    """Random texts, as many of `count` as came to an end."""
    for i in range(count):
        text = walk(automaton, seed * 1000 + i)
        if text is not None:
            yield text
