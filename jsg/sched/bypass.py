"""How often each request was passed by later ones, so that no order of the queue starves anybody."""

import numpy as np


class BypassLedger:
    """Counts, per request, the prefill tokens of later arrivals that were scheduled while it was in the engine.

    Of two requests the earlier one was passed by at least as much. So only the oldest waiting request has to be looked
    at: while it is within the bound, all are. This holds for any order of admission, and for priorities too: a request
    of a large priority passes others until the bound is used up, and not beyond.

    Invariant: `_tokens[i]` belongs to arrival `_base + i`, and all requests before `_base` have ended.
    """

    def __init__(self, bound_tokens: int):
        self._bound = bound_tokens
        self._base = 0
        self._tokens = np.zeros(1024, np.int64)

    def record(self, arrival: int, num_tokens: int) -> None:
        """Prefill tokens of request `arrival` were scheduled."""
        if arrival < self._base:
            return
        while arrival - self._base >= len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[arrival - self._base] += num_tokens

    def bypassed(self, arrival: int) -> int:
        """Prefill tokens of later arrivals scheduled so far."""
        return int(self._tokens[max(arrival + 1 - self._base, 0) :].sum())

    def is_overdue(self, arrival: int) -> bool:
        """Whether it has been passed by more than the bound."""
        return self.bypassed(arrival) > self._bound

    def forget_before(self, arrival: int) -> None:
        """No request that arrived before `arrival` will be asked about again."""
        drop = arrival - self._base
        if drop >= len(self._tokens) // 2:
            kept = self._tokens[drop:]
            self._tokens = np.zeros(max(1024, 2 * len(kept)), np.int64)
            self._tokens[: len(kept)] = kept
            self._base = arrival
