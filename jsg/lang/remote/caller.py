"""Calls an API, with retries, and counts the costs."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any, final

from jsg.errors import BackendError, JsgError, RequestError
from jsg.lang.remote.retry import Backoff
from jsg.lang.remote.usage import Meter
from jsg.lang.remote.wire import Api, Bill, Call, Delta, Failure, Scored, Token
from jsg.lang.streams.per_loop import PerLoop

MAX_CALLS = 32  # at a time; what APIs allow differs, and more of a whole batch would only fail by their rate limits
_CLIENTS_FAULT = frozenset({400, 413, 422})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One whole answer.

    Attributes:
        text: The text.
        tokens: The tokens of the text; None where the API does not report them.
        deltas: The deltas that it came in.
        finish: "stop", "length", or the API's own word.
        matched: The stop text that ended it, where the API reports it.
        bill: The cost of the call.
    """

    text: str
    tokens: tuple[Token, ...] | None
    deltas: tuple[Delta, ...]
    finish: str
    matched: str | None
    bill: Bill | None


@final
class Caller:
    """Calls one API, with retries. It takes any number of calls, and makes some of them at a time."""

    def __init__(
        self,
        api: Api,
        backoff: Backoff,
        meter: Meter,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        max_calls: int = MAX_CALLS,
    ):
        """`max_calls` are under way at a time, of each event loop; others wait."""
        self.api = api
        self._rooms = PerLoop(lambda: asyncio.Semaphore(max_calls), _nothing)
        self.meter = meter
        self._backoff = backoff
        self._sleep = sleep

    async def stream(self, call: Call) -> AsyncGenerator[Delta]:
        """Gives the deltas of a call, which is made again only as long as no text has come.

        Deltas before the first text are held back until then, because a call that is made again begins anew.

        Raises:
            RequestError: The API refused the call.
            BackendError: The last attempt failed.
        """
        num_failed = 0
        while True:
            has_text = False
            held: list[Delta] = []
            try:
                async with contextlib.aclosing(self._attempt(call)) as deltas:
                    async for delta in deltas:
                        held.append(delta)
                        has_text = has_text or bool(delta.text)
                        if has_text:
                            for one in held:
                                yield one
                            held.clear()
                for delta in held:
                    yield delta
                return
            except self.api.failures as error:
                num_failed += 1
                await self._wait(error, num_failed, may_retry=not has_text)

    async def collect(self, call: Call) -> list[Reply]:
        """Gives the `n` answers to a call. They are seen only at their end, so the whole call is made again.

        Raises the same as `stream`.
        """

        async def collect() -> list[Reply]:
            collectors = [Collector() for _ in range(call.args.n or 1)]
            async with contextlib.aclosing(self._attempt(call)) as deltas:
                async for delta in deltas:
                    collectors[delta.index].push(delta)
            bill = next((c.bill for c in collectors if c.bill is not None), None)
            return [collector.reply(bill) for collector in collectors]

        return await self._patiently(collect)

    async def _attempt(self, call: Call) -> AsyncGenerator[Delta]:
        """Makes one attempt, which counts as soon as a delta comes."""
        has_begun = has_ended = False
        bill: Bill | None = None
        try:
            with self._understood():
                async with self._rooms.here(), contextlib.aclosing(self.api.stream(call)) as deltas:
                    async for delta in deltas:
                        _check(delta, call)
                        has_begun = True
                        has_ended = has_ended or delta.finish is not None
                        bill = delta.bill or bill
                        yield delta
            if not has_ended:
                raise BackendError(f"{self.api.name} ended an answer without saying why; run the program again")
        finally:
            if has_begun:
                self.meter.count_call(bill, is_whole=has_ended and bill is not None)

    async def score(self, prompt: str, choices: tuple[str, ...]) -> Scored | None:
        """Does what `Api.score` says, with retries. Raises the same as `stream`."""

        async def attempt() -> Scored | None:
            async with self._rooms.here():
                return await self.api.score(prompt, choices)

        scored = await self._patiently(attempt)
        if scored is not None:
            if len(scored.texts) != len(choices) + 1:
                raise BackendError(
                    f"{self.api.name} must score a prompt alone and with each of {len(choices)} choices, but gave "
                    f"{len(scored.texts)} scores; use another dialect"
                )
            self.meter.count_call(scored.bill, is_whole=True)
        return scored

    async def models(self) -> list[Any]:
        """Does what `Api.models` says, with retries. Raises the same as `stream`."""
        return await self._patiently(self.api.models)

    async def _patiently[T](self, attempt: Callable[[], Awaitable[T]]) -> T:
        num_failed = 0
        while True:
            try:
                with self._understood():
                    return await attempt()
            except self.api.failures as error:
                num_failed += 1
                await self._wait(error, num_failed, may_retry=True)

    @contextlib.contextmanager
    def _understood(self) -> Iterator[None]:
        """Surrounds the reading of an answer. Raises BackendError where the answer has not the form of the API."""
        try:
            yield
        except self.api.failures:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BackendError(
                f"{self.api.name} must answer in the form of its API, but {error!r} is wrong with its answer; "
                "check base_url and dialect"
            ) from error

    async def _wait(self, error: Exception, num_failed: int, *, may_retry: bool) -> None:
        """Waits until the next attempt. Raises the failure where none follows."""
        failure = self.api.explain(error)
        wait_s = self._backoff.wait_s(failure, num_failed) if may_retry else None
        if wait_s is None:
            raise error_of(self.api.name, failure, num_failed) from error
        self.meter.count_retry()
        await self._sleep(wait_s)


async def _nothing(_: object) -> None:
    """Closes what needs no closing."""


def _check(delta: Delta, call: Call) -> None:
    """Raises ValueError where a delta does not belong to the call, which the packages do not check."""
    if not isinstance(delta.text, str) or delta.index not in range(call.args.n or 1):
        raise ValueError(f"the text {delta.text!r} of answer {delta.index!r}")


@final
class Collector:
    """Collects the deltas of one answer."""

    def __init__(self) -> None:
        self.bill: Bill | None = None
        self._deltas: list[Delta] = []
        self._tokens: list[Token] | None = []
        self._finish = "stop"
        self._matched: str | None = None

    def push(self, delta: Delta) -> None:
        """Takes a delta."""
        self._deltas.append(delta)
        if delta.tokens is not None and self._tokens is not None:
            self._tokens.extend(delta.tokens)
        elif delta.text:
            self._tokens = None
        self.bill = delta.bill or self.bill
        self._finish = delta.finish or self._finish
        self._matched = delta.matched or self._matched

    def reply(self, bill: Bill | None) -> Reply:
        """Gives the answer."""
        return Reply(
            text="".join(delta.text for delta in self._deltas),
            tokens=None if self._tokens is None else tuple(self._tokens),
            deltas=tuple(self._deltas),
            finish=self._finish,
            matched=self._matched,
            bill=bill,
        )


def error_of(name: str, failure: Failure, num_attempts: int) -> JsgError:
    """Gives the exception for a call that failed."""
    said = f"{name}: {failure.message}"
    if failure.status in _CLIENTS_FAULT:
        return RequestError(said)
    tried = f" (after {num_attempts} attempts)" if num_attempts > 1 else ""
    error = BackendError(f"{said}{tried}", failure.status)
    if failure.retry_after_s is not None:
        error.retry_after_s = max(1, round(failure.retry_after_s))
    return error
