"""A heap whose keys change."""

import heapq
import itertools
from collections.abc import Mapping
from typing import final

Key = tuple[int, ...]

SPARE_KEYS = 1024
"""How many stale keys a heap may have, beside one for each item, before it is made anew."""


@final
class KeyHeap[T]:
    """Items by their keys, the smallest first.

    A key that has changed stays in the heap, and is dropped when its turn comes.

    Invariant: the heap has each key of `_keys`, and stale ones.
    """

    def __init__(self) -> None:
        self._keys: dict[T, Key] = {}
        self._heap: list[tuple[Key, int, T]] = []
        self._pushes = itertools.count()

    def put(self, item: T, key: Key) -> bool:
        """Gives an item this key. Returns whether it had another one, or none."""
        if self._keys.get(item) == key:
            return False
        self._keys[item] = key
        heapq.heappush(self._heap, (key, next(self._pushes), item))
        if len(self._heap) > 2 * len(self._keys) + SPARE_KEYS:
            self.replace(self._keys)
        return True

    def discard(self, item: T) -> None:
        """Takes an item out, if it is here."""
        self._keys.pop(item, None)

    def first(self) -> T | None:
        """The item with the smallest key."""
        while self._heap:
            key, _, item = self._heap[0]
            if self._keys.get(item) == key:
                return item
            heapq.heappop(self._heap)
        return None

    def replace(self, keys: Mapping[T, Key]) -> None:
        """Takes these items in place of all others."""
        self._keys = {**keys}
        self._heap = [(key, next(self._pushes), item) for item, key in keys.items()]
        heapq.heapify(self._heap)
