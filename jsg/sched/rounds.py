"""The places in which requests wait, so that one post with many prompts does not keep the others waiting.

    post a, which came first     ▢▢ │ ▢▢▢▢ │ ▢▢▢▢ │ ▢▢▢▢
    post b, which came in         0 │ ▢▢   │      │
    post c, which came in         0 │ ▢▢▢▢ │ ▢    │
    post d, which came in           │    1 │ ▢▢   │
    round                         0 │  1   │  2   │  3

A request that comes while others wait gets its place in the next round, so each round ends. In a round a post has as
many prompt tokens as a step takes, and its other prompts wait in later rounds. Requests of one round keep the order of
their arrival; so where each post has one prompt, all requests do.
"""

import dataclasses
from typing import final

import numpy as np

from jsg.cache.watch import num_common
from jsg.types import Request

ROUND = 2**40
"""How much larger the places of a round are than those of the round before: more than there are requests."""


@dataclasses.dataclass(slots=True)
class _Post:
    """A post with live requests.

    Attributes:
        end: Its prompt tokens, counted as if it had had its part of each round from round 0 on.
        ids: The prompt that came last.
        num_live: How many requests are live.
    """

    end: int
    ids: np.ndarray
    num_live: int = 0


@final
class Rounds:
    """Gives each request its place.

    Attributes:
        now: The present round. It never goes back, so no new request gets a place before one that has waited for long.
    """

    def __init__(self, num_tokens: int) -> None:
        """Takes the prompt tokens that a post has in a round."""
        self.now = 0
        self._num_tokens = num_tokens
        self._last = 0
        self._num_placed = 0
        self._posts: dict[str, _Post] = {}

    def enter(self, request: Request, first: int | None) -> int:
        """The place of a request; later turns have larger places. The places just before it belong to its branches.

        Args:
            request: The request. What its prompt has in common with the last prompt of its post does not count.
            first: The first place of those that wait; None if nobody does.
        """
        self.now = max(self.now, self._last if first is None else first // ROUND)
        turn = self.now + (first is not None)
        if request.post:
            turn = self._turn(request, turn)
        self._last = max(self._last, turn)
        self._num_placed += len(request.joined) + 1
        return turn * ROUND + self._num_placed - 1

    def _turn(self, request: Request, turn: int) -> int:
        ids = request.input_ids.array
        num_new, begin = len(ids), turn * self._num_tokens
        if (post := self._posts.get(request.post)) is None:
            self._posts[request.post] = post = _Post(begin, ids)
        elif ids is post.ids:
            num_new = 1
        else:
            num_new -= min(num_common(ids, post.ids, 0), num_new - 1)
        begin = max(begin, post.end)
        post.end, post.ids = begin + num_new, ids
        post.num_live += 1
        return begin // self._num_tokens

    def leave(self, post: str) -> None:
        """A request of this post has ended, or has its turn. A post without requests is forgotten."""
        if post:
            self._posts[post].num_live -= 1
            if not self._posts[post].num_live:
                del self._posts[post]
