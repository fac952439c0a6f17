"""Which requests are in the engine where several owners share it, so that none of them keeps the others waiting.

    owner a ──▶ ▢▢▢▢▢▢▢▢▢ ─┐
    owner b ──▶ ▢          ├─ one of each in turn ──▶ the engine: each owner has at most its share of the places
    owner c ──▶ ▢▢         ─┘

An owner alone has all places. They are a few less than the engine has rows, so that the first request of another owner
runs at once. The share of each is then smaller, and whoever has more gets no place until it has less. In the line of an
owner posts take turns, as they do in the engine (`jsg/sched/rounds.py`).
"""

import dataclasses
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import final

from jsg.sched.key_heap import KeyHeap
from jsg.sched.rounds import Rounds
from jsg.types import Request

SPARE = 16
"""One of so many rows is kept for owners who have nothing in the engine."""
ROUND_TOKENS = 4096
"""The prompt tokens that a post has in a round of its owner's line."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that has no place in the engine, since when in seconds, and its place in the line of its owner."""

    request: Request
    since_s: float
    place: int


@final
class _Line:
    """The requests of an owner that wait, by name and as they came."""

    def __init__(self) -> None:
        self.waiting: dict[str, _Waiting] = {}
        self._order = KeyHeap[str]()
        self._rounds = Rounds(ROUND_TOKENS)

    def add(self, request: Request, since_s: float) -> None:
        name, first = request.rid, self._order.first()
        now = None if first is None else self.waiting[first].place
        place = self._rounds.enter(request, now)
        self.waiting[name] = _Waiting(request, since_s, place)
        self._order.put(name, (place,))

    def pop(self, name: str | None = None) -> _Waiting:
        """Takes a request out: of this name, or else the one whose turn it is."""
        name = name or self._order.first()
        assert name is not None, "no line is empty"
        self._order.discard(name)
        waiting = self.waiting.pop(name)
        self._rounds.leave(waiting.request.post)
        return waiting


@final
class Places:
    """The places of an engine and the requests that wait for one, by owner and name.

    Invariants: no line is empty; an owner whose line has a request has its share of the places.
    """

    def __init__(self, num_rows: int, now: Callable[[], float] = time.monotonic) -> None:
        """Takes the number of requests that the engine runs at the same time."""
        self._num = max(num_rows - max(num_rows // SPARE, 1), 1)
        self._now = now
        self._lines: OrderedDict[str, _Line] = OrderedDict()
        self._held: dict[str, str] = {}  # the owners of places, by the name of the request
        self._counts = Counter[str]()

    def __len__(self) -> int:
        """The number of requests that wait."""
        return sum(len(line.waiting) for line in self._lines.values())

    def add(self, owner: str, request: Request) -> None:
        """A request waits for a place; `rid` is its name."""
        if owner not in self._lines:
            self._lines[owner] = _Line()
        self._lines[owner].add(request, self._now())

    def take(self) -> list[tuple[Request, float]]:
        """Gives places to the requests that may have one now. Returns each, and how many seconds it has waited."""
        taken: list[tuple[Request, float]] = []
        share = max(self._num // len(self._counts.keys() | self._lines.keys()), 1) if self._lines else 0
        while (owner := next((owner for owner in self._lines if self._counts[owner] < share), None)) is not None:
            self._lines.move_to_end(owner)
            waiting = self._lines[owner].pop()
            if not self._lines[owner].waiting:
                del self._lines[owner]
            self._held[waiting.request.rid] = owner
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
        line = self._lines.get(owner)
        if line is None or name not in line.waiting:
            return False
        line.pop(name)
        if not line.waiting:
            del self._lines[owner]
        return True

    def grammars(self) -> set[str]:
        """The keys of the grammars that waiting requests name."""
        keys = (
            waiting.request.sampling.grammar_key for line in self._lines.values() for waiting in line.waiting.values()
        )
        return {key for key in keys if key is not None}

    def overdue(self, limit_s: float) -> list[str]:
        """The names of the requests that have waited for longer."""
        before = self._now() - limit_s
        names: list[str] = []
        for line in self._lines.values():
            for name, waiting in line.waiting.items():
                if waiting.since_s >= before:
                    break
                names.append(name)
        return names
