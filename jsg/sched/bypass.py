"""Counts how often later requests pass each request, so that no order of the queue lets a request wait for ever."""

import numpy as np


class BypassLedger:
    """Counts for each request the prefill tokens of later arrivals that were scheduled while it was in the engine.

    The earlier of two requests was passed by at least as many tokens. So it is enough to look at the oldest waiting
    request: while it is within the bound, all are. This holds for any order of admission, and for priorities too: a
    request of a large priority passes others until the bound is used up, and not beyond.

    Invariant: `_tokens[i]` belongs to arrival `_base + i`, and all requests before `_base` have ended.
    """

    def __init__(self, bound_tokens: int):
        self._bound = bound_tokens
        self._base = 0
        self._tokens = np.zeros(1024, np.int64)

    def record(self, arrival: int, num_tokens: int) -> None:
        """Counts prefill tokens that were scheduled for the request with this arrival number."""
        if arrival < self._base:
            return
        while arrival - self._base >= len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[arrival - self._base] += num_tokens

    def bypassed(self, arrival: int) -> int:
        """How many prefill tokens of later arrivals were scheduled so far."""
        return int(self._tokens[max(arrival + 1 - self._base, 0) :].sum())

    def is_overdue(self, arrival: int) -> bool:
        """Whether more tokens than the bound have passed the request."""
        return self.bypassed(arrival) > self._bound

    def forget_before(self, arrival: int) -> None:
        """No request that arrived before `arrival` will be asked about again."""
        drop = arrival - self._base
        if drop >= len(self._tokens) // 2:
            kept = self._tokens[drop:]
            self._tokens = np.zeros(max(1024, 2 * len(kept)), np.int64)
            self._tokens[: len(kept)] = kept
            self._base = arrival
