"""What a model keeps of a prefix beside the pages of layers that see all tokens: further kinds of state.

The tree says which tokens are cached. But layers with a window need the last pages before the end of a prefix in memory
of their own, and recurrent layers need the state at its end. Where that is gone, a request can use fewer tokens than
the tree has: the *usable length* of the prefix (`RadixCache.usable_len`).
"""

import dataclasses
from collections.abc import Callable
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


class StateKind(Protocol):
    """One kind of state."""

    @property
    def orders(self) -> bool:
        """Whether waiting requests are in the order of what they can use, and not of what is cached.

        Where states are few, a request computes a long cached prefix anew so that the others need not: it comes first.
        """
        ...

    def num_usable(self, match: PrefixMatch, num_tokens: int) -> int:
        """The most of the first `num_tokens` of a cached prefix after which a request can go on."""
        ...

    @property
    def num_needed(self) -> int:
        """How many last pages of a prefix decide whether a request can use all of it."""
        ...

    def is_whole(self, pages: np.ndarray, num_pages: int) -> bool:
        """Whether it can. These are the last of so many pages, `num_needed` of them or all."""
        ...

    def check(self, *, is_idle: bool) -> None:
        """Asserts that what there is of it adds up, and that nothing of it is in use when nothing runs."""
        ...

    def observe(self, told: Callable[[np.ndarray, int], None]) -> None:
        """Calls `told` each time that what pages, int32, have of the state is evicted or comes back.

        The second argument says for how many further pages this decides what can be used.
        """
        ...
