"""Texts that drafts are copied from: where the end of a text stood before, and what came after it there.

No index is kept. The newest place where the longest end of a text repeats is found by comparing it with every place at
once, which takes 22 µs for 32 000 tokens, or 53 if the repeat is long, and needs no memory. An automaton of suffixes
gives the same place; it would have to be built for each prompt first, and has up to two states for each token.
"""

import collections
import itertools
from collections.abc import Callable
from typing import final

import numpy as np

LONGEST = 16
"""Tokens that are compared before a place. Of places where more are equal, the newest counts."""
MOST_PLACES = 2**11
"""Places behind the last token of the tail that are compared further, the newest ones. A search in 131 072 equal tokens
takes 0.2 ms so, and otherwise 5.0."""
MOST_NAMESPACES = 64
SEPARATOR = -1


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


@final
class PastOutputs:
    """The last outputs of a namespace, one after another, with a separator after each.

    Args:
        capacity: Tokens that are kept. When they are full, the older half is dropped.
    """

    def __init__(self, capacity: int):
        self._tokens = np.empty(capacity, np.int32)
        self._size = 0

    @property
    def tokens(self) -> np.ndarray:
        """int32: outputs and separators, the newest last."""
        return self._tokens[: self._size]

    def add(self, output: np.ndarray) -> None:
        """Keeps an output, or the end of one that is longer than half of what is kept."""
        capacity = len(self._tokens)
        output = output[-(capacity // 2 - 1) :]
        if self._size + len(output) >= capacity:
            kept = self._tokens[self._size - capacity // 2 : self._size]
            self._tokens[: len(kept)] = kept.copy()
            self._size = len(kept)
        end = self._size + len(output)
        self._tokens[self._size : end], self._tokens[end] = output, SEPARATOR
        self._size = end + 1


@final
class ByNamespace[T]:
    """A value for each namespace, of the last `MOST_NAMESPACES` that were asked for. One never sees that of another."""

    def __init__(self, make: Callable[[], T]):
        self._make = make
        self._values: collections.OrderedDict[str, T] = collections.OrderedDict()

    def of(self, namespace: str) -> T:
        """The value of a namespace, which is made where there is none."""
        if namespace in self._values:
            self._values.move_to_end(namespace)
        else:
            self._values[namespace] = self._make()
            for oldest in [*itertools.islice(self._values, max(len(self._values) - MOST_NAMESPACES, 0))]:
                del self._values[oldest]
        return self._values[namespace]

    def clear(self) -> None:
        """Drops all values."""
        self._values.clear()


def copied(text: np.ndarray, start: int, most: int) -> list[int]:
    """At most `most` tokens from a place on, up to a separator. What goes on behind the end of the text repeats it."""
    found = text[start : start + most].tolist()
    if SEPARATOR in found:
        return found[: found.index(SEPARATOR)]
    period = len(text) - start
    return [found[index % period] for index in range(most)] if 0 < period < most else found
