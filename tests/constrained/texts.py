"""Asks a grammar about whole texts, for tests."""

import dataclasses

from jsg.constrained.build.builder import build
from jsg.constrained.ir import Grammar
from jsg.constrained.limits import LIMITS
from jsg.constrained.run.machine import Machine


def machine_of(grammar: Grammar, *, heads: int = LIMITS.heads) -> Machine:
    """The grammar's machine, following at most `heads` ways to read a text at once."""
    return Machine(build(grammar), dataclasses.replace(LIMITS, heads=heads))


def accepts(machine: Machine, text: str | bytes) -> bool:
    """Whether the whole text matches."""
    config = machine.advance(machine.start(), text.encode() if isinstance(text, str) else text)
    return config is not None and machine.is_accepting(config)


def can_begin(machine: Machine, text: str | bytes) -> bool:
    """Whether some text that matches begins so."""
    return machine.advance(machine.start(), text.encode() if isinstance(text, str) else text) is not None


def most_heads(machine: Machine, text: str) -> int:
    """The most ways to read the text that are followed at once."""
    config = machine.start()
    most = len(config)
    for byte in text.encode():
        after = machine.advance(config, bytes((byte,)))
        assert after is not None, text
        config = after
        most = max(most, len(config))
    return most
