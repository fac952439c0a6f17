"""Which replica gets a request, for all fronts together: the engine's own rule (`jsg.engine.front.routing`).

This is the plain class behind the router's actor. It needs no Ray, and takes the time as an argument.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from typing import Literal, final

from jsg.engine.front.routing import Routed, Router
from jsg.ray.prompt import PromptUnits
from jsg.types import Request, SamplingParams

logger = logging.getLogger(__name__)

MAX_REPLICAS = 256
MAX_SILENCE_S = 10.0
"""A front that reports nothing for so long has ended, and so have its requests."""
UNKNOWN_OUTPUT_LEN = 2**20  # more than the mean, so the router takes the mean


@dataclasses.dataclass(frozen=True, slots=True)
class Pool:
    """The prefix cache of a replica.

    Attributes:
        tokens: How many it holds; 0 for no cache.
        page_size: Tokens of a page.
        unit_bytes: About how many bytes of text make a token.
    """

    tokens: int
    page_size: int
    unit_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a front saw of a request.

    Attributes:
        key: The front's name for the request.
        event: "lease" when a replica has taken it, "begin" at the first byte of an answer, "end" at its last one, or
            when it was given up.
        replica: The replica that took it, for "lease".
        pool: The cache of that replica, for "lease".
    """

    key: str
    event: Literal["lease", "begin", "end"]
    replica: str = ""
    pool: Pool | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """What the router of a front knows of a request. Pickled it is only its key, so the prompt does not travel twice.

    Attributes:
        front: The name of the front.
        key: The front's name for the request.
        prompt: What it asks.
        avoid: Replicas that have failed it.
    """

    front: str
    key: str
    prompt: PromptUnits
    avoid: frozenset[str]

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.key,)


@dataclasses.dataclass(slots=True)
class _Live:
    """A request that has not ended: the front that sent it, its route, and how to route it anew."""

    front: str
    routed: Routed
    request: Request


@final
class Directory:
    """The router, the names of the replicas, and the requests of all fronts.

    Invariant: every request in `_live` counts in the load of exactly one lane of the router.
    """

    def __init__(self) -> None:
        """Knows no replica; until the first lease is reported it routes nothing."""
        self._router: Router | None = None
        self._lanes: dict[str, int] = {}  # replica → its number in the router
        self._live: dict[str, _Live] = {}
        self._heard: dict[str, float] = {}  # front → when it was last heard of

    @property
    def num_live(self) -> int:
        """How many requests have been routed and have not ended."""
        return len(self._live)

    def route(self, front: str, key: str, prompt: PromptUnits, replicas: Sequence[str], now: float) -> str | None:
        """Chooses one of these replicas; None where it cannot, so that the front must choose by itself."""
        self._hear(front, now)
        if self._router is None or not prompt.units:
            return None
        lanes = {self._lane(replica, replicas): replica for replica in replicas}
        lanes.pop(None, None)
        if not lanes:
            return None
        self._end(key)
        sampling = SamplingParams(
            max_new_tokens=UNKNOWN_OUTPUT_LEN if prompt.max_new_tokens is None else prompt.max_new_tokens
        )
        request = Request(rid=key, input_ids=prompt.units, sampling=sampling, namespace=prompt.namespace)
        routed = self._router.route(request, [lane for lane in lanes if lane is not None])
        self._live[key] = _Live(front, routed, request)
        return lanes[routed.engine]

    def note(self, front: str, reports: Sequence[Report], now: float) -> None:
        """Takes what a front has seen since its last call. A front with nothing to say says so, too."""
        self._hear(front, now)
        for report in reports:
            if report.event == "end":
                self._end(report.key)
            elif report.event == "lease":
                self._note_lease(report)
            elif (live := self._live.get(report.key)) is not None and not live.routed.is_begun:
                self._routing.begin(live.routed, live.routed.num_matched)
        for silent in [name for name, heard in self._heard.items() if now - heard > MAX_SILENCE_S]:
            del self._heard[silent]
            for key in [key for key, live in self._live.items() if live.front == silent]:
                self._end(key)

    @property
    def _routing(self) -> Router:
        assert self._router is not None
        return self._router

    def _hear(self, front: str, now: float) -> None:
        self._heard[front] = now

    def _note_lease(self, report: Report) -> None:
        """Moves a request to the replica that took it, which may be another than the chosen one."""
        if self._router is None and report.pool is not None:
            self._router = Router([report.pool.tokens] * MAX_REPLICAS, report.pool.page_size)
        live, lane = self._live.get(report.key), self._lane(report.replica, ())
        if live is not None and lane is not None and live.routed.engine != lane:
            self._routing.end(live.routed, ())
            live.routed = self._routing.route(live.request, [lane])

    def _end(self, key: str) -> None:
        if (live := self._live.pop(key, None)) is not None:
            self._routing.end(live.routed, ())

    def _lane(self, replica: str, living: Sequence[str]) -> int | None:
        """The number of a replica. A new one may get that of a replica which does not live; None where none is free."""
        if replica in self._lanes:
            return self._lanes[replica]
        free = next(iter(set(range(MAX_REPLICAS)).difference(self._lanes.values())), None)
        if free is None:
            busy = {live.routed.engine for live in self._live.values()}
            gone = [name for name, lane in self._lanes.items() if name not in living and lane not in busy]
            if not living or not gone:
                return None
            free = self._lanes.pop(gone[0])
            self._routing.forget(free)
        self._lanes[replica] = free
        return free


def by_hash(conversation: bytes, replicas: Sequence[str]) -> list[str]:
    """The replicas in the order in which a conversation prefers them: the same in every front, without any state.

    When a replica comes or goes, only the conversations that prefer it change their first choice.
    """
    return sorted(replicas, key=lambda name: hashlib.blake2b(conversation + name.encode(), digest_size=8).digest())
