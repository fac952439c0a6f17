"""How many requests may be under way, how long each may take, and when a refused client should come back."""

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import final

from jsg.config import ServerConfig
from jsg.errors import (
    FirstTokenTimeoutError,
    QueueFullError,
    RateLimitError,
    RequestError,
    ShuttingDownError,
    TimeLimitError,
)

WINDOW_S = 10.0  # how far back the drain rate looks
MAX_ENDS = 1024  # so many are remembered at most; of more in a window, the last ones tell the rate
MIN_SPAN_S = 1.0  # without it, a single end a moment ago would be a rate of thousands a second
MAX_RETRY_AFTER_S = 60
MAX_OTHERS = 4096  # holds at a time, and programs


@final
class DrainRate:
    """How many answers end per second, measured over the last `WINDOW_S` seconds."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._ends: collections.deque[float] = collections.deque(maxlen=MAX_ENDS)

    def count(self) -> None:
        """One more answer has ended now."""
        self._ends.append(self._now())

    def seconds_until(self, num_ends: int) -> int:
        """Whole seconds until so many more answers have ended at the present rate; from 1 to `MAX_RETRY_AFTER_S`.

        Where no answer ended lately the rate is not known, and this gives `MAX_RETRY_AFTER_S`.
        """
        now = self._now()
        while self._ends and self._ends[0] < now - WINDOW_S:
            self._ends.popleft()
        if not self._ends:
            return MAX_RETRY_AFTER_S
        seconds_per_end = max(now - self._ends[0], MIN_SPAN_S) / len(self._ends)
        return min(max(math.ceil(num_ends * seconds_per_end), 1), MAX_RETRY_AFTER_S)


@final
class Admission:
    """Lets requests in, as long as the server is not ending and their key has room.

    Invariant: an answer is counted from the `enter` that let it in until it has left, and every answer leaves. Holds
    and programs are counted apart: a key may have as many of each as of answers, and they keep no answer out.
    """

    def __init__(self, config: ServerConfig, now: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.is_closed = False
        self._under_way: collections.Counter[str] = collections.Counter()
        self._others: collections.Counter[tuple[str, str]] = collections.Counter()  # by kind and tenant
        self._hold_timers: set[asyncio.Timeout] = set()
        self._waiting: collections.defaultdict[str, list[asyncio.Future[None]]] = collections.defaultdict(list)
        self._is_over = False
        self._drain_rate = DrainRate(now)
        self._drain_rates: collections.defaultdict[str, DrainRate] = collections.defaultdict(lambda: DrainRate(now))

    def close(self) -> None:
        """From now on nothing enters. Answers under way go on; holds end, because nothing would come of waiting."""
        self.is_closed = True
        for timer in self._hold_timers:
            if not timer.expired():  # the hold of an expired timer is ending already
                timer.reschedule(asyncio.get_running_loop().time())

    def end(self) -> None:
        """From now on nothing enters, not even for a program that is under way."""
        self.close()
        self._is_over = True

    def due(self, started_at: float, *, has_token: bool) -> float | None:
        """When an answer must have its first token, or where it has one its end; None without a limit."""
        config = self.config
        limits = (None if has_token else config.first_token_timeout, config.request_timeout)
        spans = [span for span in limits if span is not None]
        return started_at + min(spans) if spans else None

    def exceeded(self, *, has_token: bool) -> TimeLimitError:
        """The error for an answer that did not come by the time `due`."""
        first_token_s, request_s = self.config.first_token_timeout, self.config.request_timeout
        if not has_token and first_token_s is not None and first_token_s <= (request_s or math.inf):
            return FirstTokenTimeoutError(
                f"the first token must come within {first_token_s:g} s (--first-token-timeout), but none did; "
                "send a shorter prompt, or try again later"
            )
        return TimeLimitError(
            f"a request may take {request_s:g} s (--request-timeout), but this one took longer; ask for fewer "
            "new tokens, or try again later"
        )

    @contextlib.contextmanager
    def hold(self, tenant: str) -> Iterator[Callable[[asyncio.Timeout], Callable[[], None]]]:
        """Lets a hold in. Gives a function that takes the timer of the hold once its prompt is cached.

        From then on the timer expires after `--hold-timeout`, or when the server ends. The function returns another
        one, which must be called before the timer's block ends, because the timer cannot be set after that.

        Raises:
            ShuttingDownError: The server is ending.
            RateLimitError: The key has too many.
            QueueFullError: All keys together have more than `MAX_OTHERS`.
        """
        timers: list[asyncio.Timeout] = []

        def watch(timer: asyncio.Timeout) -> Callable[[], None]:
            timers.append(timer)
            self._hold_timers.add(timer)
            loop = asyncio.get_running_loop()
            timer.reschedule(loop.time() + (0 if self.is_closed else self.config.hold_timeout))
            return lambda: self._hold_timers.discard(timer)

        with self._other("holds", tenant):
            try:
                yield watch
            finally:
                self._hold_timers.difference_update(timers)

    def program(self, tenant: str) -> contextlib.AbstractContextManager[None]:
        """Lets a program in. Raises as `hold`."""
        return self._other("programs", tenant)

    async def room(self, tenant: str, num_answers: int) -> None:
        """Waits until a tenant may have so many more answers under way. Returns at once where it never may."""
        most = self.config.max_requests_per_key
        while most is not None and num_answers <= most < self._under_way[tenant] + num_answers:
            left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[tenant].append(left)
            await left

    @contextlib.contextmanager
    def enter(self, tenant: str, num_answers: int, *, is_let_in: bool = False) -> Iterator[Callable[[], None]]:
        """Lets so many answers of a request in. Gives a function that each answer calls once, when it has ended.

        Answers that have not ended at the end of the block leave then.

        Args:
            tenant: The tenant that asks.
            num_answers: How many, at least one.
            is_let_in: The answers belong to a program that is under way, and may enter while the server ends.

        Raises:
            ShuttingDownError: The server is ending.
            RequestError: The request has more answers than a key may ever have.
            RateLimitError: The key has too many under way.
        """
        self.check(tenant, num_answers, is_let_in=is_let_in)
        num_inside = num_answers

        def leave() -> None:
            nonlocal num_inside
            num_inside -= 1
            self._under_way[tenant] -= 1
            self._drain_rate.count()
            self._drain_rates[tenant].count()
            self._wake(tenant)

        self._under_way[tenant] += num_answers
        try:
            yield leave
        except QueueFullError as error:
            error.retry_after_s = self._drain_rate.seconds_until(num_answers)
            self._under_way[tenant] -= num_inside  # they were never in the engine, so they leave no room there
            num_inside = 0
            self._wake(tenant)
            raise
        finally:
            while num_inside:
                leave()

    def check(self, tenant: str, num_answers: int, *, is_let_in: bool) -> None:
        """Raises as `enter` where it would let nothing in."""
        if self._is_over or (self.is_closed and not is_let_in):
            raise self.shutting_down()
        most = self.config.max_requests_per_key
        if most is None:
            return
        if num_answers > most:
            raise RequestError(
                f"prompts times n must be at most {most} answers (--max-requests-per-key), but got {num_answers}; "
                "send several requests, one after the other"
            )
        excess = self._under_way[tenant] + num_answers - most
        if excess > 0:
            error = RateLimitError(
                f"a key may have {most} answers under way (--max-requests-per-key), but it has "
                f"{self._under_way[tenant]} and this request asks for {num_answers}; wait for some to end"
            )
            error.retry_after_s = self._drain_rates[tenant].seconds_until(excess)
            raise error

    def shutting_down(self) -> ShuttingDownError:
        """The error for requests that come, or are still under way, when the server ends."""
        error = ShuttingDownError("the server is shutting down; send the request again, to another server or later")
        error.retry_after_s = min(max(math.ceil(self.config.shutdown_timeout), 1), MAX_RETRY_AFTER_S)
        return error

    @contextlib.contextmanager
    def _other(self, kind: str, tenant: str) -> Iterator[None]:
        """Counts a hold or a program."""
        if self.is_closed:
            raise self.shutting_down()
        most = self.config.max_requests_per_key
        if most is not None and self._others[kind, tenant] >= most:
            raise RateLimitError(
                f"a key may have {most} {kind} under way (--max-requests-per-key), but it has as many already; end "
                "some, or wait"
            )
        if sum(count for (other, _), count in self._others.items() if other == kind) >= MAX_OTHERS:
            raise QueueFullError(
                f"at most {MAX_OTHERS} {kind} may be under way, but as many are already; try again later"
            )
        self._others[kind, tenant] += 1
        try:
            yield
        finally:
            self._others[kind, tenant] -= 1
            if not self._others[kind, tenant]:
                del self._others[kind, tenant]

    def _wake(self, tenant: str) -> None:
        for left in self._waiting.pop(tenant, ()):
            if not left.done():
                left.set_result(None)
