"""Counts how often later requests pass each request, so that no order of the queue lets a request wait for ever."""

import bisect

import numpy as np


class BypassLedger:
    """Counts, for each request in the engine, the prefill tokens that were scheduled for requests of later places.

    If requests come in the order of their places, at least as many tokens pass the first one that waits as any later
    one. So it is enough to look at the first: while it is within the bound, all are. This holds for any order of
    admission, and for priorities too: a request of a large priority passes others until the bound is used up, and no
    further.

    A request may get a place between two others (`rounds.py`). Tokens that passed this place before it came do not
    count for it. So more tokens than the bound may pass a late prompt of a large post, until the prompt before it ends.

    Invariant: `_places` ascends. `_tokens[i]` counts the tokens of the request at `_places[i]`, and of the ended
    requests between the place before and this one; `_beyond` counts those of the ended requests after all places.
    """

    def __init__(self, bound_tokens: int):
        self._bound = bound_tokens
        self._places: list[int] = []
        self._tokens = np.zeros(1024, np.int64)
        self._beyond = 0
        self._at_first: dict[int, int] = {}

    def add(self, place: int) -> None:
        """Adds a request. No other request has its place."""
        index, size = bisect.bisect(self._places, place), len(self._places)
        if size == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
        self._tokens[index + 1 : size + 1] = self._tokens[index:size]
        self._tokens[index] = 0
        self._places.insert(index, place)
        self._at_first[place] = self._behind(index)

    def end(self, place: int) -> None:
        """Forgets the request at this place, which has ended. Nobody asks about it again."""
        index, last = self._index(place), len(self._places) - 1
        tokens = int(self._tokens[index])
        self._tokens[index:last] = self._tokens[index + 1 : last + 1]
        if index < last:
            self._tokens[index] += tokens
        else:
            self._beyond += tokens
        del self._places[index], self._at_first[place]

    def record(self, place: int, num_tokens: int) -> None:
        """Counts prefill tokens that were scheduled for the request at this place."""
        self._tokens[self._index(place)] += num_tokens

    def bypassed(self, place: int) -> int:
        """How many prefill tokens of later places were scheduled since the request came."""
        return self._behind(self._index(place)) - self._at_first[place]

    def is_overdue(self, place: int) -> bool:
        """Whether more tokens than the bound have passed the request."""
        return self.bypassed(place) > self._bound

    def _index(self, place: int) -> int:
        return bisect.bisect_left(self._places, place)

    def _behind(self, index: int) -> int:
        return int(self._tokens[index + 1 : len(self._places)].sum()) + self._beyond
