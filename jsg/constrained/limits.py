"""Limits on the work and the memory that one grammar may take.

A grammar that needs more is refused with the limit's name.

A Python thread cannot be stopped from outside, so each limit is checked inside the loop that it bounds.
"""

import dataclasses

from jsg.errors import GrammarError


@dataclasses.dataclass(slots=True)
class Meter:
    """What one compilation has used of the limits that its parts share."""

    char_steps: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """The most that one grammar may take.

    Attributes:
        text_bytes: Bytes of the grammar as the client wrote it.
        nesting: Depth of parentheses, schemas or rules inside one another.
        choices: Values of one enum, or choices.
        positions: Places in the expanded grammar where a byte may be; the size of the tables grows with them. Also
            the edges of all its automata: an edge takes as long as a place, although several may share one.
        transitions: Pairs of positions that may follow one another, where they are written out one by one.
        char_states: States of one automaton over characters, which is built completely to combine patterns.
        char_steps: Transitions of all such automata of one compilation, also of those that it drops.
        states: States of the byte automaton, which are made when a text first needs them.
        stack: Rules that are open at once in a text.
        heads: Ways to read a text that are followed at once. A text that has more ends with an error.
        machine_bytes: Memory of states, frames and their indexes. At half of it, those without a user are forgotten.
        mask_steps: Work for one mask, or to read one token, in the steps of `states.py`: a nanosecond or two each.
        text_steps: Work for one text. Results that other texts have computed before are free.
        token_steps: Work that each token of a text adds to `text_steps`.
        meter: What all parts of a compilation have used together; None if nothing is counted.
    """

    text_bytes: int = 1 << 20
    nesting: int = 200
    choices: int = 100_000
    positions: int = 300_000
    transitions: int = 8_000_000
    char_states: int = 20_000
    char_steps: int = 1_000_000
    states: int = 100_000
    stack: int = 1_000
    heads: int = 256
    machine_bytes: int = 64 << 20
    mask_steps: int = 40_000_000
    text_steps: int = 300_000_000
    token_steps: int = 500_000
    meter: Meter | None = dataclasses.field(default=None, compare=False)

    def metered(self) -> "Limits":
        """These limits for one compilation, with nothing spent."""
        return dataclasses.replace(self, meter=Meter())

    def spend(self, char_steps: int) -> None:
        """Counts transitions of automata over characters.

        Raises:
            GrammarError: The compilation has made more than `char_steps` by now.
        """
        if self.meter is not None:
            self.meter.char_steps += char_steps
            check(self.meter.char_steps, self.char_steps, "steps of working its patterns out")


@dataclasses.dataclass(slots=True)
class Account:
    """The work that was done for one text, and the tokens that pay for it.

    Attributes:
        num_steps: The steps taken so far. Results that other texts have computed before cost nothing.
        num_tokens: The most tokens that the text ever had.
    """

    num_steps: int = 0
    num_tokens: int = 0

    def steps_left(self, limits: Limits) -> int:
        """How many steps the text may still take; negative where it took more than it may."""
        return limits.text_steps + self.num_tokens * limits.token_steps - self.num_steps


LIMITS = Limits()
"""The limits of a server."""
STEP_STEPS = 20_000_000
"""Work for all texts of an engine together from one of its steps to the next, counted as `mask_steps`. No text is
refused for it: one that comes when it is spent waits for the next step. With a mask that begins just before it is
spent it takes less than 50 ms, which is the most that a step may keep streams waiting."""


def check(value: int, limit: int, what: str, param: str | None = None) -> None:
    """Raises GrammarError where `value` is above `limit`; `what` names it, such as "states of the pattern"."""
    if value > limit:
        raise GrammarError(
            f"a grammar may have at most {limit} {what}, but this one has more; simplify it", param=param
        )
