"""A model of a replica: an LRU cache of blocks, and steps of a batch that take as long as their tokens need.

In each step a replica gives every running answer one token and computes at most `CHUNK` tokens of prompts, first come
first served, as engines with continuous batching and chunked prefill do. Constants are those of a model of about 70
billion parameters on a few GPUs. They move all times; which policy is better depends on their proportions only.
"""

import dataclasses
import heapq
from collections import OrderedDict, deque
from collections.abc import Sequence

from bench.scale.traces import Call
from jsg.engine.front.prefix_index import BLOCK_TOKENS, Chain

STEP_S = 0.020
"""The time of a step in which one answer goes on."""
ROW_S = 0.0005
"""What each running answer adds to it."""
TOKEN_S = 1 / 8000
"""What each token of a prompt adds to it."""
CHUNK = 2048


class BlockCache:
    """Blocks of prompts and answers. It drops the least recently used one, and of a chain the last first."""

    def __init__(self, max_blocks: int) -> None:
        """Makes an empty cache."""
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._gained: list[bytes] = []
        self._lost: list[bytes] = []

    def match(self, chain: Chain) -> int:
        """How many blocks of the chain's beginning are here."""
        for count, block in enumerate(chain):
            if block not in self._blocks:
                return count
        return len(chain)

    def use(self, chain: Chain) -> None:
        """Adds what is not here, and makes all of it most recently used."""
        blocks = self._blocks
        for block in reversed(chain):
            if block in blocks:
                blocks.move_to_end(block)
            else:
                blocks[block] = None
                self._gained.append(block)
        while len(blocks) > self._max_blocks:
            self._lost.append(blocks.popitem(last=False)[0])

    def take_changes(self) -> tuple[Chain, Chain]:
        """The blocks that have come, and those that have gone, since the last call of this."""
        gained = tuple(block for block in self._gained if block in self._blocks)
        lost = tuple(block for block in self._lost if block not in self._blocks)
        self._gained.clear()
        self._lost.clear()
        return gained, lost


def cached_len(call: Call, num_matched: int) -> int:
    """The tokens of a prompt that need not be computed; the last one always runs."""
    return min(num_matched * BLOCK_TOKENS, call.prompt_len - 1)


@dataclasses.dataclass(slots=True, eq=False)
class Live:
    """A call in a replica.

    Attributes:
        call: The call.
        router: The router that sent it.
        came_s: When it came, in seconds.
        cached: Tokens of its prompt that were cached, when its turn has come.
        todo: Tokens of its prompt that are still to be computed; None before its turn.
    """

    call: Call
    router: int
    came_s: float
    cached: int = 0
    todo: int | None = None


class Replica:
    """One replica. It is idle until a call is added; then it steps until all calls have ended."""

    def __init__(self, pool_blocks: int) -> None:
        """Makes a replica whose KV pool holds this many blocks."""
        self.cache = BlockCache(pool_blocks)
        self.waiting: deque[Live] = deque()
        self.live_blocks = 0  # of calls that have begun or wait
        self._running: list[tuple[int, int, Live]] = []  # a heap by the step in which each ends
        self._num_steps = 0
        self._num_begun = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is left to do."""
        return not self.waiting and not self._running

    def add(self, live: Live) -> None:
        """Puts a call into the queue."""
        self.waiting.append(live)
        self.live_blocks += len(live.call.prompt) + len(live.call.answer)

    def step(self) -> tuple[float, Sequence[Live], Sequence[Live]]:
        """Does a step. Returns how many seconds it takes, and which calls get their first and their last token."""
        room, begun = CHUNK, list[Live]()
        while self.waiting and room:
            live = self.waiting[0]
            if live.todo is None:
                live.cached = cached_len(live.call, self.cache.match(live.call.prompt))
                live.todo = live.call.prompt_len - live.cached
                self.cache.use(live.call.prompt)
            taken = min(room, live.todo)
            live.todo -= taken
            room -= taken
            if live.todo:
                break
            begun.append(self.waiting.popleft())
        seconds = STEP_S + ROW_S * len(self._running) + TOKEN_S * (CHUNK - room)
        self._num_steps += 1
        for live in begun:
            self._num_begun += 1
            last = self._num_steps + live.call.output_len - 1
            heapq.heappush(self._running, (last, self._num_begun, live))
        ended = list[Live]()
        while self._running and self._running[0][0] <= self._num_steps:
            live = heapq.heappop(self._running)[2]
            self.cache.use(live.call.kept)
            self.live_blocks -= len(live.call.prompt) + len(live.call.answer)
            ended.append(live)
        return seconds, begun, ended
