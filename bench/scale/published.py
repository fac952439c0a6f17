"""The published rules of SGLang, Dynamo and llm-d, written from their descriptions, with their default constants.

Without events each of them remembers, as its documents say, the prompts that it has sent, and here as many blocks for a
replica as the replica's pool has. With events it knows what the replicas say, and nothing else.
"""

from collections import Counter
from typing import final

import numpy as np

from bench.scale.policies import POLL_S, CountsCalls, Setting
from bench.scale.traces import Call
from jsg.engine.front.prefix_index import BlockHolders, Chain, PrefixIndex, PrefixPath

SGLANG_THRESHOLD = 0.3
SGLANG_ABS, SGLANG_REL = 64, 1.5
"""The router's defaults (`--cache-threshold`, `--balance-abs-threshold`, `--balance-rel-threshold`)."""

DYNAMO_OVERLAP_WEIGHT = 1.0
"""The router's default (`--router-kv-overlap-score-weight`); its default temperature is 0, so the least cost wins."""

LLM_D_PREFIX, LLM_D_QUEUE, LLM_D_KV_USE, LLM_D_NO_HIT = 3, 2, 2, 2
"""Weights of `prefix-cache-scorer`, `queue-scorer`, `kv-cache-utilization-scorer` and `no-hit-lru-scorer` in the
configuration `optimized-baseline` of llm-d-router 0.10. Its metrics are `POLL_S` old (`--refresh-metrics-interval`)."""


class KnowsCaches(CountsCalls):
    """A policy that knows how much of a prompt each replica has."""

    def __init__(self, setting: Setting) -> None:
        """Knows nothing yet."""
        super().__init__(setting)
        self._holders = BlockHolders(self.num_replicas)
        self._caches = [PrefixIndex(setting.pool_blocks, self._holders, each) for each in range(self.num_replicas)]

    def match(self, call: Call) -> np.ndarray:
        """int64 [replicas]: the number of blocks of the prompt that each has."""
        return self._holders.match(PrefixPath(call.prompt))

    def choose(self, call: Call, now_s: float) -> int:
        chosen = super().choose(call, now_s)
        if not self.setting.has_events:
            self._caches[chosen].use(PrefixPath(call.prompt))
        return chosen

    def note_stored(self, replica: int, blocks: Chain) -> None:
        self._caches[replica].store(blocks)

    def note_removed(self, replica: int, blocks: Chain) -> None:
        self._caches[replica].remove(blocks)


@final
class SGLang(KnowsCaches):
    """`cache_aware` of SGLang's router: prefixes while the load is balanced, otherwise the shortest queue.

    If the best match is more than the threshold of the prompt, the least loaded of the replicas with that match is
    taken, otherwise the least loaded of all.
    """

    def pick(self, call: Call, now_s: float) -> int:
        least, most = self.num_calls.min(), self.num_calls.max()
        if not (most - least > SGLANG_ABS and most > SGLANG_REL * least):
            matched = self.match(call)
            if matched.max() > SGLANG_THRESHOLD * len(call.prompt):
                return self.lowest(np.where(matched == matched.max(), self.num_calls, np.inf))
        return self.lowest(self.num_calls)


@final
class Dynamo(KnowsCaches):
    """The least cost of Dynamo's KV router: blocks to compute, its own and those of live calls, and blocks in use."""

    def __init__(self, setting: Setting) -> None:
        """Knows nothing yet."""
        super().__init__(setting)
        self._computing = np.zeros(self.num_replicas)  # blocks of prompts that have not begun to be answered
        self._missing: dict[Call, int] = {}
        self._users = [Counter[bytes]() for _ in range(self.num_replicas)]  # of blocks in use
        self._in_use = np.zeros(self.num_replicas)
        self._used = BlockHolders(self.num_replicas)

    def pick(self, call: Call, now_s: float) -> int:
        missing = len(call.prompt) - self.match(call)
        in_use = self._in_use + len(call.prompt) - self._used.match(PrefixPath(call.prompt))
        chosen = self.lowest(DYNAMO_OVERLAP_WEIGHT * (self._computing + missing) + in_use)
        self._missing[call] = int(missing[chosen])
        self._computing[chosen] += missing[chosen]
        self._in_use[chosen] = in_use[chosen]
        self._users[chosen].update(call.prompt)
        for block in call.prompt:
            self._used.add(block, chosen)
        return chosen

    def begin(self, call: Call, cached_tokens: int) -> None:
        self._computing[self.replica_of(call)] -= self._missing.pop(call)

    def end(self, call: Call) -> None:
        replica = self.replica_of(call)
        users = self._users[replica]
        for block in call.prompt:
            users[block] -= 1
            if not users[block]:
                del users[block]
                self._used.discard(block, replica)
                self._in_use[replica] -= 1
        super().end(call)


@final
class LlmD(KnowsCaches):
    """The greatest sum of llm-d's weighted scores, each from 0 to 1. Queues and use of pools are read off replicas."""

    def __init__(self, setting: Setting) -> None:
        """Knows nothing yet."""
        super().__init__(setting)
        self._read_at_s = -np.inf
        self._queued = self._kv_use = np.zeros(self.num_replicas)
        self._cold_at = np.zeros(self.num_replicas)  # when each got a call without any hit, as a count of such calls

    def pick(self, call: Call, now_s: float) -> int:
        if now_s >= self._read_at_s + POLL_S:
            replicas = self.setting.replicas
            self._read_at_s = now_s
            self._queued = np.array([len(replica.waiting) for replica in replicas])
            used = np.array([replica.live_blocks for replica in replicas]) / self.setting.pool_blocks
            self._kv_use = np.minimum(used, 1)
        matched, spread = self.match(call), np.ptp(self._queued)
        queue = (self._queued.max() - self._queued) / spread if spread else np.ones(self.num_replicas)
        is_cold = not matched.any()
        turn = np.argsort(np.argsort(self._cold_at, kind="stable")) / max(self.num_replicas - 1, 1)
        scores = LLM_D_PREFIX * matched / len(call.prompt) + LLM_D_QUEUE * queue + LLM_D_KV_USE * (1 - self._kv_use)
        chosen = self.lowest(-(scores + LLM_D_NO_HIT * (1 - turn if is_cold else 0.5)))
        if is_cold:
            self._cold_at[chosen] = self._cold_at.max() + 1
        return chosen
