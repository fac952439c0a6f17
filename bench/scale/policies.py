"""What all policies are, those that need no knowledge of caches, and jsg's own, which is the router of `jsg serve`."""

import abc
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import final

import numpy as np

from bench.scale.replicas import Replica
from bench.scale.traces import Call
from jsg.engine.front.prefix_index import BLOCK_TOKENS, Chain, answered_path
from jsg.engine.front.routing import Routed, Router
from jsg.prompt_ids import PromptIds
from jsg.types import Request, SamplingParams

POLL_S = 0.05
"""How old queues and loads may be that a policy reads off replicas or off other routers."""

MAX_NEW_TOKENS = 1024
"""What requests ask for; no policy knows how long an answer will be."""


@dataclasses.dataclass(slots=True)
class Setting:
    """What a router finds.

    Attributes:
        replicas: The replicas. A policy may read of them only what a metrics endpoint would say.
        pool_blocks: How many blocks the pool of each replica holds.
        rng: Its source of chance.
        has_events: Whether replicas tell it which blocks their caches gain and lose.
        digests: For each block the name that jsg's routers have for it; all of them share this.
        routers: All routers, itself too. It may read of the others only what they tell.
    """

    replicas: list[Replica]
    pool_blocks: int
    rng: np.random.Generator
    has_events: bool
    digests: dict[bytes, bytes]
    routers: list["Policy"]


class Policy(abc.ABC):
    """One router. Each call is chosen a replica for, begins and ends once."""

    def __init__(self, setting: Setting) -> None:
        """Makes a router that has sent nothing yet."""
        self.setting = setting
        self.num_replicas = len(setting.replicas)

    @abc.abstractmethod
    def choose(self, call: Call, now_s: float) -> int:
        """The number of the replica that gets a call."""

    def begin(self, call: Call, cached_tokens: int) -> None:  # noqa: B027
        """Notes the first token of an answer, and how much of the prompt was cached."""

    def end(self, call: Call) -> None:  # noqa: B027
        """Notes the last token of an answer."""

    def note_stored(self, replica: int, blocks: Chain) -> None:  # noqa: B027
        """Notes what a replica's cache has gained, for whichever router."""

    def note_removed(self, replica: int, blocks: Chain) -> None:  # noqa: B027
        """Notes what a replica's cache has lost."""

    def lowest(self, costs: np.ndarray) -> int:
        """The replica with the least cost; chance decides between equals."""
        return int(self.setting.rng.choice(np.flatnonzero(costs == costs.min())))


@final
class HashOfKey(Policy):
    """The hash of the conversation or the document."""

    def choose(self, call: Call, now_s: float) -> int:
        digest = hashlib.blake2b(str(call.key).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.num_replicas


@final
class RoundRobin(Policy):
    """One after another."""

    def __init__(self, setting: Setting) -> None:
        """Begins anywhere."""
        super().__init__(setting)
        self._turns = itertools.count(int(setting.rng.integers(self.num_replicas)))

    def choose(self, call: Call, now_s: float) -> int:
        return next(self._turns) % self.num_replicas


class CountsCalls(Policy):
    """A policy that knows how many of its own calls each replica has not ended."""

    def __init__(self, setting: Setting) -> None:
        """Makes a router that has sent nothing yet."""
        super().__init__(setting)
        self.num_calls = np.zeros(self.num_replicas, np.int64)
        self._chosen: dict[Call, int] = {}

    def choose(self, call: Call, now_s: float) -> int:
        chosen = self._chosen[call] = self.pick(call, now_s)
        self.num_calls[chosen] += 1
        return chosen

    @abc.abstractmethod
    def pick(self, call: Call, now_s: float) -> int:
        """The number of the replica that gets a call."""

    def replica_of(self, call: Call) -> int:
        """The replica that has a call which has not ended."""
        return self._chosen[call]

    def end(self, call: Call) -> None:
        self.num_calls[self._chosen.pop(call)] -= 1


@final
class LeastLoaded(CountsCalls):
    """The replica with the fewest calls of this router."""

    def pick(self, call: Call, now_s: float) -> int:
        return self.lowest(self.num_calls)


@final
class Jsg(Policy):
    """`jsg.engine.front.routing.Router`, called as `EngineFleet` calls it. With events routers hear each other too."""

    def __init__(self, setting: Setting) -> None:
        """Makes a router for as many engines."""
        super().__init__(setting)
        rng = setting.rng if setting.has_events else None
        self._router = Router([setting.pool_blocks * BLOCK_TOKENS] * self.num_replicas, rng=rng)
        self._heard_at_s = -np.inf
        self._all = list(range(self.num_replicas))
        self._routed: dict[Call, Routed] = {}

    def choose(self, call: Call, now_s: float) -> int:
        if self.setting.has_events and now_s >= self._heard_at_s + POLL_S:
            self._heard_at_s = now_s
            self._router.note_others(sum(self._told_by_others(), np.zeros((2, self.num_replicas), np.int64)))
        sampling = SamplingParams(max_new_tokens=MAX_NEW_TOKENS)
        request = Request(rid="r", input_ids=PromptIds.of(_tokens(call.prompt)), sampling=sampling)
        routed = self._routed[call] = self._router.route(request, self._all)
        if self.setting.has_events:
            self.setting.digests.update(zip(call.prompt, routed.path.stem, strict=True))
        return routed.engine

    def begin(self, call: Call, cached_tokens: int) -> None:
        self._router.begin(self._routed[call], cached_tokens)

    def end(self, call: Call) -> None:
        routed, output = self._routed.pop(call), _tokens(call.answer)
        self._router.end(routed, output)
        if self.setting.has_events:
            path = answered_path(routed.request, routed.path, output)
            self.setting.digests.update(zip(call.kept, path.stem, strict=True))

    def note_stored(self, replica: int, blocks: Chain) -> None:
        self._router.note_stored(replica, map(self.setting.digests.__getitem__, blocks))

    def note_removed(self, replica: int, blocks: Chain) -> None:
        self._router.note_removed(replica, map(self.setting.digests.__getitem__, blocks))

    def _told_by_others(self) -> Iterator[np.ndarray]:
        for policy in self.setting.routers:
            if isinstance(policy, Jsg) and policy is not self:
                yield policy._router.told


def _tokens(blocks: Chain) -> tuple[int, ...]:
    """Tokens that are equal exactly where the names of blocks are."""
    return tuple(np.frombuffer(b"".join(blocks), "<i4").repeat(BLOCK_TOKENS).tolist())


MakePolicy = Callable[[Setting], Policy]
