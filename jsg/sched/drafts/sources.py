"""The sources of drafts that copy: where the end of a text stood before, and what came after it there.

No index is kept. The newest place where the longest end of a text repeats is found by comparing it with every place at
once, which takes 22 µs for 32 000 tokens, or 53 if the repeat is long, and needs no memory. An automaton of suffixes
gives the same place; it would have to be built for each prompt first, and has up to two states for each token.
"""

import collections
import dataclasses
from typing import NamedTuple, Protocol, final

import numpy as np

from jsg.cache.following import following
from jsg.sched.drafts.estimates import LONGEST, Estimates
from jsg.sched.request import RunningRequest
from jsg.step_reports import Source

PAST_TOKENS = 2**15
"""Tokens of past outputs of a namespace that are kept."""
MOST_PLACES = 2**11
"""Places behind the last token of the tail that are compared further, the newest ones. A search in 131 072 equal tokens
takes 0.2 ms so, and otherwise 5.0."""
MOST_NAMESPACES = 64
SEPARATOR = -1


class Guess(NamedTuple):
    """Tokens that may come behind a text.

    Attributes:
        source: Where they come from.
        num_equal: How many tokens of the text, from its end on, are before them there too.
        tokens: The tokens; none where the source has nothing that fits.
        num_read: How many tokens were read to find them.
    """

    source: Source
    num_equal: int
    tokens: list[int]
    num_read: int = 0


class DraftSource(Protocol):
    """Guesses what comes next."""

    def propose(self, running: RunningRequest, text: np.ndarray, room: int) -> Guess:
        """At most `room` tokens behind a text, int32: all that a running request has, and what is forced then."""
        ...


@dataclasses.dataclass(slots=True, eq=False)
class Memory:
    """What is kept of a namespace.

    Attributes:
        estimates: How often guesses came true in it.
        outputs: int32, its last outputs, one after another, with a separator after each.
    """

    estimates: Estimates = dataclasses.field(default_factory=Estimates)
    outputs: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0, np.int32))

    def add(self, output: np.ndarray) -> None:
        """Keeps an output, int32."""
        self.outputs = np.concatenate([self.outputs, output, np.array([SEPARATOR], np.int32)])[-PAST_TOKENS:]


@final
class Memories(collections.OrderedDict[str, Memory]):
    """What is kept of the last `MOST_NAMESPACES` that were asked for. One never sees that of another."""

    def of(self, namespace: str) -> Memory:
        """The memory of a namespace, which is made where there is none."""
        self[namespace] = memory = self.pop(namespace, None) or Memory()
        if len(self) > MOST_NAMESPACES:
            self.popitem(last=False)
        return memory


@final
class Tree:
    """What followed the same text in the radix tree."""

    def __init__(self, page_size: int):
        self._page_size = page_size

    def propose(self, running: RunningRequest, text: np.ndarray, room: int) -> Guess:
        """See `DraftSource`. A joined request has another key than its tokens."""
        tokens, place = list[int](), running.place
        if place is not None and running.layout is None:
            rest = text[place.num_tree_pages * self._page_size :]
            tokens = following(place.lock.node, rest, room, self._page_size)
        return Guess(Source.TREE, len(text) - running.num_prompt, tokens)


@final
class Prediction:
    """What follows the end of the text in the answer that the client predicts. It begins behind the prompt."""

    def propose(self, running: RunningRequest, text: np.ndarray, room: int) -> Guess:
        """See `DraftSource`."""
        if running.request.prediction is None:
            return Guess(Source.PREDICTION, 0, [])
        before = running.tokens[max(running.num_prompt - LONGEST, 0) : running.num_prompt]
        expected = np.concatenate([before, running.request.prediction.array])
        start, num_equal = last_repeat(expected, text[-LONGEST:])
        tokens = expected[start : start + room].tolist() if num_equal else []
        return Guess(Source.PREDICTION, num_equal, tokens, len(expected))


@final
class OwnText:
    """What followed the end of the text where that stood before in it."""

    def propose(self, running: RunningRequest, text: np.ndarray, room: int) -> Guess:
        """See `DraftSource`."""
        start, num_equal = last_repeat(text[:-1], text[-LONGEST:])
        return Guess(Source.TEXT, num_equal, copied(text, start, room) if num_equal else [], len(text))


@final
class PastOutputs:
    """What followed the end of the text where that stood in a past output of the namespace."""

    def __init__(self, memories: Memories):
        self._memories = memories

    def propose(self, running: RunningRequest, text: np.ndarray, room: int) -> Guess:
        """See `DraftSource`."""
        past = self._memories.of(running.namespace).outputs
        start, num_equal = last_repeat(past, text[-LONGEST:])
        return Guess(Source.PAST, num_equal, copied(past, start, room) if num_equal else [], len(past))


def last_repeat(text: np.ndarray, tail: np.ndarray) -> tuple[int, int]:
    """The newest place in a text after the longest part that equals the end of `tail`, among `MOST_PLACES` places.

    Args:
        text: int32. If `tail` is its own end, it is given without its last token.
        tail: int32, one token at least.

    Returns:
        The index of what follows there, and how many tokens before it are equal, at most `LONGEST`; both are 0 where
        not even one is.
    """
    places = np.flatnonzero(text == tail[-1])[-MOST_PLACES:]
    newest = length = 0
    while len(places):
        newest, length = int(places[-1]) + 1, length + 1
        if length == min(LONGEST, len(tail)):
            break
        places = places[places >= length]
        places = places[text[places - length] == tail[-1 - length]]
    return newest, length


def copied(text: np.ndarray, start: int, most: int) -> list[int]:
    """At most `most` tokens from a place on, up to a separator. What goes on behind the end of the text repeats it."""
    found = text[start : start + most].tolist()
    if SEPARATOR in found:
        return found[: found.index(SEPARATOR)]
    period = len(text) - start
    return [found[index % period] for index in range(most)] if 0 < period < most else found
