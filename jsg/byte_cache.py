"""A cache that is bounded by the bytes of its values and drops what was not used for longest."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import final


@final
class ByteCache[Key: Hashable, Value]:
    """Values by key. Not for several threads at once.

    Invariant: `num_bytes` is the size of all values. It exceeds the bound only where there is a single value.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[Value], int]) -> None:
        """Makes an empty cache of at most `max_bytes`, where a value takes `size_of(value)` bytes."""
        self.num_bytes = 0
        self._max_bytes = max_bytes
        self._size_of = size_of
        self._values: OrderedDict[Key, Value] = OrderedDict()  # the least recently used first

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def get(self, key: Key) -> Value | None:
        """The value of a key, which then is the most recently used; None where the key is unknown."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Key, value: Value) -> list[Key]:
        """Keeps a value in place of the one that the key had; returns the keys that are dropped for it."""
        if key in self._values:
            self._drop(key)
        self._values[key] = value
        self.num_bytes += self._size_of(value)
        dropped: list[Key] = []
        while self.num_bytes > self._max_bytes and len(self._values) > 1:
            dropped.append(next(iter(self._values)))
            self._drop(dropped[-1])
        return dropped

    def _drop(self, key: Key) -> None:
        self.num_bytes -= self._size_of(self._values.pop(key))
