"""One HTTP request and its response, as metrics, the request log and traces see them."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, final

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Scope

from jsg.errors import JsgError
from jsg.server.caller import state_of
from jsg.server.http.failures import CLIENT_LEFT, Refusal
from jsg.server.observer import Begun
from jsg.server.telemetry.abort_reasons import CLIENT_DISCONNECT, ERROR, REFUSED, end_reason
from jsg.server.telemetry.trace_context import TraceContext
from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt
from jsg.waits import CLOCK, WaitClock, Waited, WaitReason

logger = logging.getLogger(__name__)

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OTHER = "other"  # stands for an unknown method or path: clients choose those, so they must not become labels


@dataclasses.dataclass(frozen=True, slots=True)
class Endpoint:
    """One of the server's paths.

    Attributes:
        route: Its path, with the names of parameters in it; `OTHER` for a path that the server does not have.
        generates: Whether requests to it generate.
    """

    route: str
    generates: bool


@final
class Exchange:
    """One HTTP request and its response, as far as they have come; an `Observer` of what is generated for it.

    Attributes:
        endpoint: The endpoint that was asked.
        method: The HTTP method, or `OTHER`.
        trace: The client's span that the request belongs to; None for no span.
        started_at, ended_at: `time.monotonic()`.
        started_ns: Nanoseconds since the epoch.
        status: The status of the response; None before it begins.
        is_stream: Whether the response is a stream of events.
        state: The ASGI state of the request, with its caller, its `request_id`, its `WaitClock`, and `is_whole` once
            the end of the response was sent.
        user: The end user, as the client named it.
        prompts, answers: The prompts and the `n` answers to each in turn; empty before the generation begins.
        begun_at: `time.monotonic()` when the first generation began.
        failure: Why the generation or the response was cut short, one of `ABORT_REASONS`; None where neither was.
        trace_id: The id of its trace, 32 hexadecimal digits; None where it has no trace.
    """

    def __init__(self, endpoint: Endpoint, scope: Scope, state: dict[str, Any]) -> None:
        self.endpoint = endpoint
        self.method: str = scope["method"] if scope["method"] in METHODS else OTHER
        self.trace = TraceContext.parse(scope["headers"])
        self.started_at = self.ended_at = time.monotonic()
        self.started_ns = time.time_ns()
        self.status: int | None = None
        self.is_stream = False
        self.state = state
        self.user: str | None = None
        self.prompts: Sequence[Prompt] = ()
        self.answers: Sequence[Answer] = ()
        self.begun_at: float | None = None
        self.failure: str | None = None
        self.trace_id = self.trace.trace_id if self.trace else None

    @classmethod
    def unread(cls, state: dict[str, Any]) -> "Exchange":
        """A request that was refused before it had a method and a path."""
        made = cls(Endpoint(OTHER, generates=False), {"method": OTHER, "headers": []}, state)
        made.status = state["refusal"].status
        return made

    def note(self, message: Message) -> None:
        """Notes what is sent."""
        if message["type"] == "http.response.body":
            if not message.get("more_body", False):
                self.state["is_whole"] = True
            return
        self.status = message["status"]
        self.is_stream = any(
            name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
        )

    def on_start(self, begun: Begun) -> None:
        """Notes the prompts and the answers, which grow while they are generated."""
        self.prompts = (*self.prompts, *begun.prompts)
        self.answers = (*self.answers, *begun.answers)
        self.begun_at = self.begun_at or begun.started_at
        self.user = begun.user

    def on_delta(self, begun: Begun, answer: Answer, delta: AnswerDelta) -> None:
        """Does nothing: the answers hold their deltas already."""

    def on_end(self, begun: Begun, error: BaseException | None) -> None:
        """Notes why the answers were cut short."""
        if error is not None:
            self.failure = end_reason(begun.answers, error)
        if isinstance(error, JsgError):
            self.state.setdefault("refusal", Refusal.of(error, self.state))

    @property
    def refusal(self) -> Refusal | None:
        """What the client learned of a failure, before a stream began or in the stream."""
        return self.state.get("refusal")

    @property
    def first_answers(self) -> list[Answer]:
        """The first answer to each prompt, for values that count once for a prompt."""
        starts = itertools.accumulate((prompt.sampling.n for prompt in self.prompts[:-1]), initial=0)
        return [self.answers[start] for start in starts] if self.prompts else []

    @property
    def first_token_s(self) -> float | None:
        """Seconds from the request to the first token of any answer."""
        first = min((a.first_token_s for a in self.answers if a.first_token_s is not None), default=None)
        return None if first is None or self.begun_at is None else self.begun_at - self.started_at + first

    @property
    def waited(self) -> Waited:
        """For what it waited, and for how long: of several answers, the one that waited longest."""
        each = [answer.waited for answer in self.answers if answer.waited is not None]
        clock: WaitClock | None = self.state.get("wait_clock")
        return max(each, key=lambda waited: sum(waited.values()), default={} if clock is None else clock.waited)

    @property
    def outcome(self) -> str:
        """`ok`; `refused`, if it was refused before anything was generated; or one of `ABORT_REASONS`."""
        reason = self.failure or end_reason(self.answers, None)
        if reason is None and not self.has_succeeded:
            return ERROR if self.answers else REFUSED
        return reason or "ok"

    @property
    def has_succeeded(self) -> bool:
        """Whether the client got a whole response. One that shows its answer as aborted counts as whole."""
        return self.failure is None and self.status is not None and self.status < 400


@final
class EndpointTable:
    """The server's endpoints by their paths."""

    def __init__(self, routes: Iterable[BaseRoute], dependency: Callable[..., Any]) -> None:
        """Takes the routes of the app. The routes that depend on `dependency` generate."""
        self._fixed: dict[str, Endpoint] = {}
        self._patterns: list[tuple[Any, Endpoint]] = []
        for route in routes:
            if not isinstance(route, Route):
                continue
            parts = route.dependant.dependencies if isinstance(route, APIRoute) else ()
            endpoint = Endpoint(route.path, any(part.call is dependency for part in parts))
            if "{" in route.path:
                self._patterns.append((route.path_regex, endpoint))
            else:
                self._fixed[route.path] = endpoint

    def __iter__(self) -> Iterator[Endpoint]:
        yield from self._fixed.values()
        yield from (endpoint for _, endpoint in self._patterns)

    def find(self, path: str) -> Endpoint:
        """The endpoint of a path."""
        endpoint = self._fixed.get(path)
        if endpoint is None:
            endpoint = next((known for pattern, known in self._patterns if pattern.match(path)), Endpoint(OTHER, False))
        return endpoint


class ExchangeObserver(Protocol):
    """Observes each HTTP request when its response is over. It must be quick; an exception that it raises is logged."""

    def on_exchange(self, exchange: Exchange) -> None:
        """The response was sent, or the client left."""
        ...


@final
class WatchExchanges:
    """Makes an `Exchange` of each request and shows it to observers at the end."""

    def __init__(
        self, endpoints: EndpointTable, observers: Sequence[ExchangeObserver], waits: Counter[WaitReason]
    ) -> None:
        self._waits = waits
        self._endpoints = endpoints
        self._observers = observers

    @contextlib.contextmanager
    def exchange(self, scope: Scope) -> Iterator[Exchange]:
        """The exchange of a request, which is answered during the block."""
        state = state_of(scope)
        exchange = state["exchange"] = Exchange(self._endpoints.find(scope["path"]), scope, state)
        clock = state["wait_clock"] = WaitClock(self._waits)
        outer = CLOCK.set(clock)
        failed_status = CLIENT_LEFT
        try:
            yield exchange
            if exchange.status is not None and not exchange.is_stream and "is_whole" not in state:
                exchange.failure = exchange.failure or CLIENT_DISCONNECT  # streams may have no end
        except asyncio.CancelledError:
            raise
        except Exception:
            failed_status = 500
            raise
        finally:
            CLOCK.reset(outer)
            exchange.status = exchange.status or failed_status
            exchange.ended_at = time.monotonic()
            self._show(exchange)
            del state["exchange"]  # they hold each other

    def _show(self, exchange: Exchange) -> None:
        for observer in self._observers:
            try:
                observer.on_exchange(exchange)
            except Exception:
                logger.exception("a finished request could not be reported")
