"""Which grammars an engine core has been given, and which it may forget."""

import asyncio
from collections import OrderedDict
from typing import final

ENGINE_GRAMMAR_BYTES = 64 * 2**20
"""Tables that a core keeps for requests to come; those that run keep their own."""


@final
class GrammarLedger:
    """Kept by whoever sends grammars to a core, which decides nothing by itself: so the two never disagree.

    Attributes:
        is_open: Set once the core takes requests that have a grammar.
    """

    def __init__(self, max_bytes: int = ENGINE_GRAMMAR_BYTES) -> None:
        self.is_open = asyncio.Event()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sizes: OrderedDict[str, int] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._sizes

    def add(self, key: str, num_bytes: int) -> None:
        """Notes a grammar that is being sent, `num_bytes` large."""
        self._sizes[key] = num_bytes
        self._num_bytes += num_bytes

    def use(self, key: str) -> list[str]:
        """Notes that a request names this grammar; returns those that are forgotten for it, least recently used."""
        self._sizes.move_to_end(key)
        forgotten = []
        while self._num_bytes > self._max_bytes and len(self._sizes) > 1:
            oldest, num_bytes = self._sizes.popitem(last=False)
            self._num_bytes -= num_bytes
            forgotten.append(oldest)
        return forgotten
