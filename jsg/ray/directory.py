"""Which replica gets a request, for all fronts together: the engine's own rule (`jsg.engine.front.routing`).

Serve runs one `Directory` as a deployment of its own. The class needs no Ray. Its methods are coroutines that never
wait, so calls run one after another.
"""

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, final

from jsg.engine.front.routing import Routed, Router
from jsg.prompt_ids import PromptIds
from jsg.ray.prompt import PromptUnits
from jsg.types import Request, SamplingParams

MAX_REPLICAS = 256
MAX_SILENCE_S = 10.0
"""A replica or front that says nothing for so long has ended, and so have its requests."""
MAX_OUTPUT_LEN = 2**20  # of a request that says nothing; it is more than the mean, so the router takes the mean
UNKNOWN_TOKEN = -1  # no unit of a prompt is negative


class Pool(NamedTuple):
    """The prefix cache of a replica.

    Attributes:
        units: How many units of prompts it holds; 0 for no cache.
        page_size: Units of a page.
        unit_bytes: Bytes of text in a unit, which is about a token.
    """

    units: int
    page_size: int
    unit_bytes: int


class Report(NamedTuple):
    """What a front saw of a request.

    Attributes:
        key: The front's name for the request.
        event: "begin" at the first byte of its answer, "end" at the last one, or where it was given up.
        num_tokens: About how many tokens the answer has, at its end; 0 where it is not known.
    """

    key: str
    event: Literal["begin", "end"]
    num_tokens: int = 0


class Known(NamedTuple):
    """What fronts go by when the directory is late: the addresses of the replicas by their names, and their pools."""

    urls: dict[str, str]
    pool: Pool | None


@dataclasses.dataclass(slots=True)
class _Replica:
    """A replica that lives.

    Attributes:
        lane: Its number in the router.
        url: Its address.
        heard: When it was last heard of.
        is_able: No request has failed there since.
    """

    lane: int
    url: str
    heard: float
    is_able: bool = True


class _Live(NamedTuple):
    """A request that has not ended: the front that sent it, and its route."""

    front: str
    routed: Routed


@final
class Directory:
    """The router, the replicas, and the requests of all fronts.

    Invariant: every request in `_live` counts in the load of one lane of the router. A lane is given to a new replica
    only when no such request is left there.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows nothing until replicas join."""
        self._clock = clock
        self._router: Router | None = None
        self._pool: Pool | None = None
        self._replicas: dict[str, _Replica] = {}
        self._left: set[str] = set()  # a call of `join` may come after that of `leave`
        self._live: dict[str, _Live] = {}
        self._fronts: dict[str, float] = {}  # front → when it was last heard of

    @property
    def num_live(self) -> int:
        """How many requests have been routed and have not ended."""
        return len(self._live)

    async def join(self, name: str, url: str, pool: Pool) -> None:
        """Notes that a replica lives, which it says again and again until it leaves."""
        if name in self._left:
            return
        if self._router is None:
            self._pool, self._router = pool, Router([pool.units] * MAX_REPLICAS, pool.page_size)
        if (known := self._replicas.get(name)) is not None:
            known.heard, known.is_able = self._clock(), True
            return
        used = {replica.lane for replica in self._replicas.values()}
        used |= {live.routed.engine for live in self._live.values()}
        if free := set(range(MAX_REPLICAS)) - used:
            self._replicas[name] = _Replica(min(free), url, self._clock())

    async def leave(self, name: str) -> None:
        """Notes that a replica takes no more requests, and never will."""
        self._left.add(name)
        self._drop(name)

    async def route(self, front: str, key: str, prompt: PromptUnits, avoid: frozenset[str]) -> tuple[str, str] | None:
        """Chooses a replica of those that have not failed a request since they joined last. None where there is none.

        Args:
            front: The front's name.
            key: The front's name for the request.
            prompt: What the request asks.
            avoid: The replicas that have failed it just now.

        Returns:
            The name of the replica and its address.
        """
        self._fronts[front] = self._clock()
        for name in avoid & self._replicas.keys():
            self._replicas[name].is_able = False
        able = [name for name, replica in self._replicas.items() if replica.is_able]
        if not able:
            return None
        lanes = {self._replicas[name].lane: name for name in able}
        limit = MAX_OUTPUT_LEN if prompt.max_new_tokens is None else prompt.max_new_tokens
        sampling = SamplingParams(max_new_tokens=limit)
        units = PromptIds.of(prompt.units or (0,))
        request = Request(rid=key, input_ids=units, sampling=sampling, namespace=prompt.namespace)
        routed = self._routing.route(request, list(lanes))
        self._live[key] = _Live(front, routed)
        chosen = lanes[routed.engine]
        return chosen, self._replicas[chosen].url

    async def note(self, front: str, reports: Sequence[Report]) -> Known:
        """Takes what a front has seen since its last call. A front with nothing to say says so, too."""
        now = self._fronts[front] = self._clock()
        for key, event, num_tokens in reports:
            if event == "end":
                self._end(key, num_tokens)
            elif (live := self._live.get(key)) is not None and not live.routed.is_begun:
                self._routing.begin(live.routed, live.routed.num_matched)
        for silent in [name for name, heard in self._fronts.items() if now - heard > MAX_SILENCE_S]:
            del self._fronts[silent]
            for key in [key for key, live in self._live.items() if live.front == silent]:
                self._end(key)
        for silent in [name for name, replica in self._replicas.items() if now - replica.heard > MAX_SILENCE_S]:
            self._drop(silent)
        return Known({name: replica.url for name, replica in self._replicas.items()}, self._pool)

    @property
    def _routing(self) -> Router:
        assert self._router is not None, "a replica has joined"
        return self._router

    def _drop(self, name: str) -> None:
        if (gone := self._replicas.pop(name, None)) is not None:
            self._routing.forget(gone.lane)

    def _end(self, key: str, num_tokens: int = 0) -> None:
        """Ends a request. Its answer takes room in the cache and has a length, but no prompt matches it."""
        if (live := self._live.pop(key, None)) is not None:
            self._routing.end(live.routed, (UNKNOWN_TOKEN,) * min(num_tokens, MAX_OUTPUT_LEN))


def by_hash(conversation: bytes, replicas: Sequence[str]) -> str:
    """The replica that a conversation prefers: the same in every front, without any state.

    When a replica comes or goes, only the conversations that prefer it change.
    """
    return min(replicas, key=lambda name: hashlib.blake2b(conversation + name.encode(), digest_size=8).digest())
