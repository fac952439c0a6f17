"""Which requests are in the engine where several owners share it, so that none of them keeps the others waiting.

    owner a ──▶ ▢▢▢▢▢▢▢▢▢ ─┐
    owner b ──▶ ▢          ├─ one of each in turn ──▶ the engine: each owner has at most its share of the places
    owner c ──▶ ▢▢         ─┘

An owner alone has all places. They are a few less than the engine has rows, so that the first request of another owner
runs at once. The share of each is then smaller, and whoever has more gets no place until it has less.
"""

import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import final

from jsg.types import Request

SPARE = 16
"""One of so many rows is kept for owners who have nothing in the engine."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that has no place, and since when in seconds."""

    request: Request
    since_s: float


@final
class Places:
    """The places of an engine and the requests that wait for one, by owner and name.

    Invariants: no line is empty; an owner whose line has a request has its share of the places.
    """

    def __init__(self, num_rows: int, now: Callable[[], float] = time.monotonic) -> None:
        """Takes the number of requests that the engine runs at the same time."""
        self._num = max(num_rows - max(num_rows // SPARE, 1), 1)
        self._now = now
        self._lines: OrderedDict[str, OrderedDict[str, _Waiting]] = OrderedDict()
        self._held: dict[str, str] = {}  # the owners of places, by the name of the request
        self._counts = Counter[str]()

    def __len__(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._lines.values()))

    def add(self, owner: str, request: Request) -> None:
        """A request waits for a place; `rid` is its name."""
        self._lines.setdefault(owner, OrderedDict())[request.rid] = _Waiting(request, self._now())

    def take(self) -> list[tuple[Request, float]]:
        """Gives places to the requests that may have one now. Returns each, and how many seconds it has waited."""
        taken: list[tuple[Request, float]] = []
        share = max(self._num // len(self._counts.keys() | self._lines.keys()), 1) if self._lines else 0
        while (owner := next((owner for owner in self._lines if self._counts[owner] < share), None)) is not None:
            self._lines.move_to_end(owner)
            name, waiting = self._lines[owner].popitem(last=False)
            if not self._lines[owner]:
                del self._lines[owner]
            self._held[name] = owner
            self._counts[owner] += 1
            taken.append((waiting.request, round(self._now() - waiting.since_s, 3)))
        self._counts = +self._counts
        return taken

    def leave(self, owner: str, name: str) -> bool:
        """A request has ended. Returns whether it had no place yet."""
        if self._held.pop(name, None) is not None:
            self._counts[owner] -= 1
            self._counts = +self._counts
            return False
        line = self._lines.get(owner, {})
        if line.pop(name, None) is None:
            return False
        if not line:
            del self._lines[owner]
        return True

    def grammars(self) -> set[str]:
        """The keys of the grammars that waiting requests name."""
        keys = (waiting.request.sampling.grammar_key for line in self._lines.values() for waiting in line.values())
        return {key for key in keys if key is not None}

    def overdue(self, limit_s: float) -> list[str]:
        """The names of the requests that have waited for longer."""
        before = self._now() - limit_s
        names: list[str] = []
        for line in self._lines.values():
            for name, waiting in line.items():
                if waiting.since_s >= before:
                    break
                names.append(name)
        return names
