"""For what requests wait, from their arrival at the server to their first step."""

import contextlib
import enum
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import final


class WaitReason(enum.StrEnum):
    """For what a request waits. `WHY` has a sentence for each. The order is that in which a request comes to them."""

    TEXT = "text"
    MEDIA = "media"
    TURN = "turn"
    KEY_LIMIT = "key_limit"
    GRAMMAR = "grammar"
    LOADING = "loading"
    KEY_SHARE = "key_share"
    NEXT_STEP = "next_step"
    OVERDUE = "overdue"
    STEP_TOKENS = "step_tokens"
    PREFILL_TOKENS = "prefill_tokens"
    TREE_WORK = "tree_work"
    ROWS = "rows"
    PAGES = "pages"
    WINDOWS = "windows"
    PICTURES = "pictures"
    STATE = "state"
    BRANCHES = "branches"


AT_THE_DOOR = (WaitReason.TEXT, WaitReason.MEDIA, WaitReason.TURN, WaitReason.KEY_LIMIT)
"""What an HTTP request waits for before it has requests to an engine."""
BEFORE_THE_ENGINE = (WaitReason.GRAMMAR, WaitReason.LOADING, WaitReason.KEY_SHARE)
"""What a request waits for that is meant for an engine and has not been sent to it."""
IN_THE_ENGINE = tuple(reason for reason in WaitReason if reason not in AT_THE_DOOR + BEFORE_THE_ENGINE)

Waited = Mapping[WaitReason, float]
"""Seconds by reason, without the reasons for which nobody waited."""


def stat_of(reason: WaitReason) -> str:
    """The name of the value that counts the requests that wait for it, in the `stats` of an engine."""
    return f"num_waiting_{reason.value}"


def sum_of(waits: Iterable[Waited | None]) -> Waited | None:
    """The seconds of several waits that follow one another; None where nobody waited."""
    total = defaultdict[WaitReason, float](float)
    for waited in waits:
        for reason, seconds in (waited or {}).items():
            total[reason] += seconds
    return total or None


WHY: Mapping[WaitReason, str] = {
    WaitReason.TEXT: "Its text is being read, rendered or tokenised, or waits for a thread that does so.",
    WaitReason.MEDIA: "Its pictures and videos are being fetched or decoded.",
    WaitReason.TURN: "The event loop of the front has turns, and works for other requests.",
    WaitReason.KEY_LIMIT: "It is a call of a program, and its key has as many answers under way as it may.",
    WaitReason.GRAMMAR: "Its grammar is being compiled, or waits in its key's line for that.",
    WaitReason.LOADING: "The engine is still loading what grammars need.",
    WaitReason.KEY_SHARE: "Its key has its share of the engine's rows, and requests of other keys have theirs.",
    WaitReason.NEXT_STEP: "A step is under way, and the next one has not been planned yet.",
    WaitReason.OVERDUE: "Memory is kept for an earlier request, which too many have passed (--max-bypass-tokens).",
    WaitReason.STEP_TOKENS: "Steps are full of new tokens of requests that run (--chunked-prefill-size).",
    WaitReason.PREFILL_TOKENS: "As many prompt tokens as a step admits were admitted (--max-prefill-tokens).",
    WaitReason.TREE_WORK: "The prefix cache had so much work that the rest was left for later steps.",
    WaitReason.ROWS: "Every row has a running request (--max-running-requests).",
    WaitReason.PAGES: "The KV pool has no room beside what running requests have and are expected to need.",
    WaitReason.WINDOWS: "The memory of layers with a window has no room for one more request.",
    WaitReason.PICTURES: "The memory of encoded pictures has no room for its pictures.",
    WaitReason.STATE: "A step makes the state of a prefix that it shares, with which it can go on.",
    WaitReason.BRANCHES: "The branches of its joined prompt are being computed.",
}
"""Why a request waits, for people. Requests wait for the first requests of the queue too, so for what these lack."""


def by_name(waited: Waited | None) -> dict[str, float]:
    """The seconds by the names of the reasons, the longest wait first."""
    longest_first = sorted((waited or {}).items(), key=lambda item: -item[1])
    return {reason.value: round(seconds, 6) for reason, seconds in longest_first}


@final
class WaitClock:
    """For what one request waits outside of the engine. Of things that it waits for at the same time each counts once.

    Attributes:
        counts: How many requests wait for each reason, shared by all requests.
    """

    def __init__(self, counts: Counter[WaitReason], now: Callable[[], float] = time.monotonic) -> None:
        """Starts without a wait."""
        self.counts = counts
        self._now = now
        self._begun: dict[WaitReason, tuple[float, int]] = {}  # since when, and for how many such things
        self._seconds = defaultdict[WaitReason, float](float)

    @property
    def waited(self) -> Waited:
        """For how long it has waited, with waits that last."""
        now = self._now()
        lasting = {reason: now - since for reason, (since, _) in self._begun.items()}
        return sum_of((self._seconds, lasting)) or {}

    @contextlib.contextmanager
    def on(self, reason: WaitReason) -> Iterator[None]:
        """The request waits during the block."""
        since, num = self._begun.get(reason, (self._now(), 0))
        self._begun[reason] = since, num + 1
        self.counts[reason] += not num
        try:
            yield
        finally:
            since, num = self._begun[reason]
            if num > 1:
                self._begun[reason] = since, num - 1
            else:
                del self._begun[reason]
                self.counts[reason] -= 1
                self._seconds[reason] += self._now() - since


CLOCK: ContextVar[WaitClock | None] = ContextVar("jsg_wait_clock", default=None)
"""The clock of the HTTP request that a task works for. What it waits for is deep inside of what knows no request."""


def waiting(reason: WaitReason) -> contextlib.AbstractContextManager[None]:
    """The HTTP request that this task works for waits during the block, if there is one."""
    clock = CLOCK.get()
    return contextlib.nullcontext() if clock is None else clock.on(reason)


def waited_so_far() -> Waited:
    """For how long the HTTP request that this task works for has waited."""
    clock = CLOCK.get()
    return {} if clock is None else clock.waited
