"""What a grammar says of whole texts, for tests."""

from jsg.constrained.builder import build
from jsg.constrained.ir import Grammar
from jsg.constrained.machine import Machine


def machine_of(grammar: Grammar) -> Machine:
    """The grammar's machine."""
    return Machine(build(grammar))


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
