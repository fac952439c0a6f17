"""What a model keeps of a prefix beside the pages of layers that see all tokens: further kinds of state.

The tree says which tokens are cached. But layers with a window need the last pages before the end of a prefix in memory
of their own, and recurrent layers need the state at its end. Where that is gone, a request can use fewer tokens than
the tree has: the *usable length* of the prefix (`RadixCache.usable_len`).
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from jsg.cache.node import Node


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PrefixMatch:
    """The longest cached prefix of a prompt. Its pages may be evicted until it is locked.

    Attributes:
        pages: int32, a copy of the matched page numbers.
        node: The node at which the match ends, which `RadixCache.lock` takes; of a watch, in whose edge it ends.
        num_tokens: How many tokens matched.
    """

    pages: np.ndarray
    node: Node
    num_tokens: int


class Units(Protocol):
    """Something of which rows get units: pages, parts of pages, slots of states."""

    @property
    def num_available(self) -> int:
        """Units that rows can get: those that are free, and those that nothing but the cache uses."""
        ...

    @property
    def num_yielding(self) -> int:
        """Units that would become available if all holds ended."""
        ...


class StateKind(Units, Protocol):
    """One kind of state. What rows get of it, one at a time, is a unit: a part of a page, a slot with a state."""

    @property
    def orders(self) -> bool:
        """Whether waiting requests are in the order of what they can use, and not of what is cached.

        Where states are few, a request computes a long cached prefix anew so that the others need not: it comes first.
        """
        ...

    def num_usable(self, match: PrefixMatch, num_tokens: int) -> int:
        """The most of the first `num_tokens` of a cached prefix behind which a request can go on."""
        ...

    def keep_longest(self, matches: Iterable[PrefixMatch], num_next: int) -> None:
        """Lets go last what it takes to use these prefixes, which waiting requests match, if few units are free."""
        ...

    def growth(self, num_there: int, num_more: int, num_next: int) -> int:
        """Units that a row of some tokens is expected to take for more tokens, `num_next` of them in the next step."""
        ...

    def check(self, *, is_idle: bool) -> None:
        """Asserts that the units of each account add up to all, and that none is in use when nothing runs."""
        ...

    def observe(self, told: Callable[[np.ndarray, int], None]) -> None:
        """Calls `told` each time that what pages, int32, have of the state is evicted or comes back.

        The second argument is behind how many further pages this decides what can be used.
        """
        ...
