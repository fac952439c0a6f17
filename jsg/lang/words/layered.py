"""A dictionary whose copies share what they have in common."""

import threading
from collections.abc import Iterator, Mapping
from typing import final


@final
class LayeredDict[V](Mapping[str, V]):
    """A dictionary that forks in time that does not depend on its size; a fork and its origin change apart.

    It is a few layers, each a plain dictionary; the last one is its own, and all others are shared and never change
    again. A name means what the last layer that has it says. Names have the order in which they were set first, as in
    a dictionary.

    Invariant: each shared layer is more than twice as large as the next one, so that there are few of them, and each
    entry is copied a few times at most while a state grows.
    """

    __slots__ = ("_layers", "_lock")

    def __init__(self, entries: Mapping[str, V] | None = None) -> None:
        """A dictionary with these entries."""
        self._layers: tuple[dict[str, V], ...] = (dict(entries or {}),)
        self._lock = threading.Lock()  # a change must not come into a layer that another thread shares

    def fork(self) -> "LayeredDict[V]":
        """Gives a dictionary with the same entries."""
        made = LayeredDict[V]()
        with self._lock:
            if self._layers[-1]:
                *shared, last = self._layers
                while shared and len(shared[-1]) <= 2 * len(last):
                    last = shared.pop() | last
                self._layers = (*shared, last, {})
            made._layers = (*self._layers[:-1], {})
        return made

    def __getitem__(self, name: str) -> V:
        for layer in reversed(self._layers):
            if name in layer:
                return layer[name]
        raise KeyError(name)

    def __setitem__(self, name: str, value: V) -> None:
        with self._lock:
            self._layers[-1][name] = value

    def __contains__(self, name: object) -> bool:
        return any(name in layer for layer in self._layers)

    def __iter__(self) -> Iterator[str]:
        return iter(self._whole())

    def __len__(self) -> int:
        return len(self._whole())

    def _whole(self) -> dict[str, V]:
        """A copy of it in one dictionary."""
        whole: dict[str, V] = {}
        for layer in self._layers:
            whole.update(layer)
        return whole
