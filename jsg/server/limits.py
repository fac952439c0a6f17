"""How many requests may be under way, how long each may take, and when a refused client should come back."""

import asyncio
import collections
import contextlib
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import final

from jsg.config import ServerConfig
from jsg.errors import (
    FirstTokenTimeoutError,
    QueueFullError,
    RateLimitError,
    RequestError,
    ShuttingDownError,
    TimeLimitError,
    queue_full,
)
from jsg.waits import WaitReason, waiting

WINDOW_S = 10.0  # how far back the drain rate looks
MAX_ENDS = 1024  # so many are remembered at most; of more in a window, the last ones tell the rate
MIN_SPAN_S = 1.0  # without it, a single end a moment ago would be a rate of thousands a second
MAX_RETRY_AFTER_S = 60
MAX_OTHERS = 4096  # holds at a time, and programs
MAX_STREAMS = 1024  # of the programs of a key that run at the same time


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


class Admission:
    """Lets requests in, as long as the server is not ending and there is room for all of their answers.

    A key may have `--max-requests-per-key` answers under way, and all keys together as many as the engines take. Where
    there are several keys, a key may have half of what the others leave, so there is always room for another one.

    Invariant: an answer is counted from the `enter` that let it in until it has left, and every answer leaves. Holds,
    programs and grammars are counted apart: a key may have as many of each as of answers, and they keep no answer of a
    key out.
    """

    def __init__(
        self,
        config: ServerConfig,
        now: Callable[[], float] = time.monotonic,
        *,
        capacity: Callable[[], int] | None = None,
        has_several_keys: bool = False,
    ) -> None:
        """Nothing is under way.

        Args:
            config: The limits.
            now: A clock, in seconds.
            capacity: Gives how many requests the engines take now; None for any number.
            has_several_keys: Whether there are several keys, none of which may fill the engines.
        """
        self.config = config
        self._capacity = capacity
        self._has_several_keys = has_several_keys
        self.is_closed = False
        self._under_way: collections.Counter[str] = collections.Counter()
        self._others: collections.Counter[tuple[str, str]] = collections.Counter()  # by kind and tenant
        self._holds: dict[asyncio.TimerHandle, Callable[[], None]] = {}  # what ends each of those whose time runs
        self._rooms = _Lines(lambda tenant, _, num_answers: self._excess(tenant, num_answers) is None)
        self._streams = _Lines(lambda _, num_taken, num: num_taken + num <= max(MAX_STREAMS, num))
        self._is_over = False
        self._drain_rate = DrainRate(now)
        self._drain_rates: collections.defaultdict[str, DrainRate] = collections.defaultdict(lambda: DrainRate(now))

    def close(self) -> None:
        """From now on nothing enters. Answers under way go on; holds end, because nothing would come of waiting."""
        self.is_closed = True
        for end in [*self._holds.values()]:
            end()

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
    def hold(self, tenant: str) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Lets a hold in. Gives a function that takes, once its prompt is cached, what ends the hold.

        That is called after `--hold-timeout`, or when the server ends, unless the hold has ended by then.

        Raises:
            ShuttingDownError: The server is ending.
            RateLimitError: The key has too many.
            QueueFullError: All keys together have more than `MAX_OTHERS`.
        """
        timers: list[asyncio.TimerHandle] = []

        def watch(end: Callable[[], None]) -> None:
            after_s = 0 if self.is_closed else self.config.hold_timeout
            timers.append(asyncio.get_running_loop().call_later(after_s, end))
            self._holds[timers[0]] = end

        with self._other("holds", tenant):
            try:
                yield watch
            finally:
                for timer in timers:
                    timer.cancel()
                    del self._holds[timer]

    def program(self, tenant: str) -> contextlib.AbstractContextManager[None]:
        """Lets a program in. Raises as `hold`."""
        return self._other("programs", tenant)

    def grammar(self, tenant: str) -> contextlib.AbstractContextManager[None]:
        """Lets in a grammar that is compiled for nobody's answer. Raises as `hold`."""
        return self._other("grammars", tenant)

    def streams(self, tenant: str, num_streams: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Waits until the programs of a tenant that run leave room for one with so many streams, and keeps the room."""
        return self._streams.room(tenant, num_streams)

    def room(self, tenant: str, num_answers: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Waits until a tenant may have so many more answers under way, and keeps the room, which `enter` then takes.

        Nothing may happen between the end of the block and `enter`. It does not wait where there never is so much room.
        """
        most = num_answers if self._capacity is None else self._capacity()
        most = most // 2 if self._capacity is not None and self._has_several_keys else most
        if num_answers > min(self.config.max_requests_per_key or most, most):
            return contextlib.nullcontext()
        return self._rooms.room(tenant, num_answers)

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
            QueueFullError: There are too many under way in all.
        """
        self.check(tenant, num_answers, is_let_in=is_let_in)
        num_inside = num_answers

        def leave() -> None:
            nonlocal num_inside
            num_inside -= 1
            self._under_way[tenant] -= 1
            self._drain_rate.count()
            self._drain_rates[tenant].count()
            self._rooms.wake()

        self._under_way[tenant] += num_answers
        try:
            yield leave
        except QueueFullError as error:
            error.retry_after_s = self._drain_rate.seconds_until(num_answers)
            self._under_way[tenant] -= num_inside  # they were never in the engine, so they leave no room there
            num_inside = 0
            self._rooms.wake()
            raise
        finally:
            while num_inside:
                leave()

    def check(self, tenant: str, num_answers: int, *, is_let_in: bool) -> None:
        """Raises as `enter` where it would let nothing in."""
        if self._is_over or (self.is_closed and not is_let_in):
            raise self.shutting_down()
        most = self.config.max_requests_per_key
        if most is not None and num_answers > most:
            raise RequestError(
                f"prompts times n must be at most {most} answers (--max-requests-per-key), but got {num_answers}; "
                "send several requests, one after the other"
            )
        if error := self._excess(tenant, num_answers):
            raise error

    def _excess(self, tenant: str, num_answers: int) -> RateLimitError | QueueFullError | None:
        """The error where a tenant may not have so many more answers now."""
        own, most = self._under_way[tenant] + self._rooms.taken[tenant], self.config.max_requests_per_key
        if most is not None and own + num_answers > most:
            error = RateLimitError(
                f"a key may have {most} answers under way (--max-requests-per-key), but it has "
                f"{own} and this request asks for {num_answers}; wait for some to end"
            )
            error.retry_after_s = self._drain_rates[tenant].seconds_until(own + num_answers - most)
            return error
        if self._capacity is None:
            return None
        capacity = self._capacity()
        holds = sum(count for (kind, _), count in self._others.items() if kind == "holds")
        others = self._under_way.total() + self._rooms.taken.total() - own + holds
        most_own = (capacity - others) // 2 if self._has_several_keys else capacity - others
        if own + num_answers <= most_own:
            return None
        full = queue_full(capacity)
        if self._has_several_keys:
            full = QueueFullError(
                f"a key may have half of the requests that others leave of {capacity}, which are {max(most_own, 0)}, "
                f"but it has {own} and this request asks for {num_answers}; try again later"
            )
        full.retry_after_s = self._drain_rate.seconds_until(num_answers)
        return full

    def shutting_down(self) -> ShuttingDownError:
        """The error for requests that come, or are still under way, when the server ends."""
        error = ShuttingDownError("the server is shutting down; send the request again, to another server or later")
        error.retry_after_s = min(max(math.ceil(self.config.shutdown_timeout), 1), MAX_RETRY_AFTER_S)
        return error

    @contextlib.contextmanager
    def _other(self, kind: str, tenant: str) -> Iterator[None]:
        """Counts a hold, a program or a grammar."""
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


@final
class _Lines:
    """Those who wait until there is room for their tenant, each tenant's in the order in which they came.

    Invariant: no line is empty.

    Attributes:
        taken: The room that each tenant keeps.
    """

    def __init__(self, fits: Callable[[str, int, int], bool]) -> None:
        """`fits` says whether there is room now for a tenant, who keeps so much room already, and a size."""
        self.taken: collections.Counter[str] = collections.Counter()
        self._fits = fits
        self._lines: dict[str, collections.deque[tuple[asyncio.Future[None], int]]] = {}

    @contextlib.asynccontextmanager
    async def room(self, tenant: str, size: int) -> AsyncGenerator[None]:
        """Waits for room, and keeps it during the block."""
        left: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(tenant, collections.deque()).append((left, size))
        self.wake()
        try:
            with waiting(WaitReason.KEY_LIMIT):
                await left
            yield
        finally:
            if left.done() and not left.cancelled():
                self.taken[tenant] -= size
                asyncio.get_running_loop().call_soon(self.wake)  # once it is known what came of the room

    def wake(self) -> None:
        """Says that there may be more room."""
        for tenant, line in [*self._lines.items()]:
            while line and (line[0][0].done() or self._fits(tenant, self.taken[tenant], line[0][1])):
                left, size = line.popleft()
                if not left.done():  # else nobody waits any more
                    self.taken[tenant] += size
                    left.set_result(None)
            if not line:
                del self._lines[tenant]
        self.taken = +self.taken
