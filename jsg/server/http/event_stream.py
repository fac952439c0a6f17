"""Server-sent events, and work that is cancelled when its client leaves."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any, final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jsg.errors import JsgError
from jsg.server.caller import state_of
from jsg.server.http.failures import INTERNAL_ERROR, told_error
from jsg.server.http.json_pieces import json_pieces, next_piece

logger = logging.getLogger(__name__)

Event = dict[str, Any]
Events = Event | list[Event] | bytes
"""An event, or several that are sent together, which costs little more than one. Its JSON is that of `json_pieces`.
Bytes are those of an `EventForm`."""

HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # with it, nginx and what is built on it pass each event on at once
    (b"content-type", b"text/event-stream; charset=utf-8"),
)
EVENTS_AT_ONCE = 8
DONE = b"data: [DONE]\n\n"
COMMENT = b": still here\n\n"  # clients ignore comments in a stream of events

# Python's `splitlines`, which some clients use, ends lines at these characters; the specification of events does not.
LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")


Write = Callable[[bytes], bool]
"""Sends a piece of a stream at once, or gives False where it must be sent as a message."""


def writer_of(request: Request) -> Write:
    """What writes to the connection of a request, whose stream must have begun when it is called."""
    return state_of(request.scope).get("write_piece", lambda piece: False)


async def until_disconnect[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs the work; when the client leaves first, cancels the work and raises ClientDisconnect.

    The request's body must have been read before, so that the next message from the client says that it left.
    """
    task, has_left = asyncio.current_task(), False
    assert task is not None
    num_cancels = task.cancelling()

    async def watch() -> None:
        nonlocal has_left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        has_left = task.cancel()

    # It begins before the work, so it also learns first that the client has left, where the work waits for a send.
    watching = asyncio.Task(watch(), loop=asyncio.get_running_loop(), eager_start=True)
    try:
        return await work
    finally:
        watching.cancel()
        if has_left and task.uncancel() <= num_cancels:
            raise ClientDisconnect from None


async def _yield_to_others() -> None:
    await asyncio.sleep(0)


def respond_with_events(
    request: Request,
    events: AsyncGenerator[Events],
    *,
    named: bool = False,
    beat_s: float | None = None,
    turn: Callable[[], Awaitable[None]] = _yield_to_others,
) -> Response:
    """A response that streams the events, at least one.

    It begins with the first event, so that a failure before it is an ordinary HTTP failure. A later failure becomes an
    event in the form of the endpoint; the trace of an unforeseen one goes to the log. When the client leaves, `events`
    is closed at once.

    Args:
        request: The request that is answered.
        events: The events to send.
        named: Each event is named by its `type`, and the last event ends the stream. Otherwise events have no names,
            and `[DONE]` ends the stream.
        beat_s: Seconds between comments in the stream; proxies would take a connection that is silent for long for a
            dead one. None sends no comments.
        turn: Waits until more of a long event may be made.
    """
    return _EventStream(request, events, named=named, beat_s=beat_s, turn=turn)


@final
class _EventStream(Response):
    status_code, background = 200, None

    def __init__(
        self,
        request: Request,
        events: AsyncGenerator[Events],
        *,
        named: bool,
        beat_s: float | None,
        turn: Callable[[], Awaitable[None]],
    ) -> None:
        self.raw_headers = [*HEADERS]  # the base class would make them anew, with a length
        self._request = request
        self._events = events
        self._encode = _encode_named if named else _encode
        self._ending = b"" if named else DONE
        self._beat_s = beat_s
        self._turn = turn
        self._has_begun = False
        self._is_inside = False  # of an event that is sent in pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(self._request, self._send_all(send))
        except ClientDisconnect:
            if not self._has_begun:
                raise
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        async def send_body(body: bytes, *, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

        event, number = await anext(self._events), 0
        self._has_begun, write = True, writer_of(self._request)
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        beating = None if self._beat_s is None else asyncio.create_task(self._beat(self._beat_s, send_body))
        try:
            while event is not None:
                if isinstance(event, bytes):
                    if not write(event):
                        await send_body(event)
                else:
                    await self._send(event if isinstance(event, list) else [event], send_body)
                number += 1
                # Neither the next event nor a send to a client that has left needs to wait. Without this line no
                # other task would run, and nobody would notice that the client has left.
                if not number % EVENTS_AT_ONCE:
                    await asyncio.sleep(0)
                event = await anext(self._events, None)
        except Exception as error:
            if not isinstance(error, JsgError):
                logger.exception("a stream was cut short")
                error = JsgError(INTERNAL_ERROR)
            await send_body(_failure_event(self._request.scope, error, named=self._encode is _encode_named))
        finally:
            if beating is not None:
                beating.cancel()
                await asyncio.gather(beating, return_exceptions=True)
        await send_body(self._ending, more_body=False)

    async def _beat(self, every_s: float, send_body: Callable[[bytes], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(every_s)
            if not self._is_inside:  # else clients get something anyway
                await send_body(COMMENT)

    async def _send(self, events: list[Event], send_body: Callable[[bytes], Awaitable[None]]) -> None:
        pieces, is_last = itertools.chain.from_iterable(map(self._encode, events)), False
        try:
            while not is_last:
                piece, is_last = next_piece(pieces)
                self._is_inside = not is_last
                if piece:
                    await send_body(piece)
                if not is_last:
                    await self._turn()
        finally:
            self._is_inside = False


def failure_events(scope: Scope, error: JsgError) -> bytes:
    """The last events of a stream that ends with an error, at a path of `/v1/messages`, or one with nameless events."""
    named = scope["path"].startswith("/v1/messages")
    return _failure_event(scope, error, named=named) + (b"" if named else DONE)


def _failure_event(scope: Scope, error: JsgError, *, named: bool) -> bytes:
    body = told_error(scope, error)
    if named and "type" not in body:  # in OpenAI's named events the fields of an error are at the top
        body = body["error"] | {"type": "error"}
    return b"".join((_encode_named if named else _encode)(body))


def _encode(event: Event) -> Iterator[bytes]:
    yield b"data: "
    yield from map(_one_line, json_pieces(event))
    yield b"\n\n"


def _encode_named(event: Event) -> Iterator[bytes]:
    name = "error" if "error" in event else event["type"]  # whatever the class of the error is
    yield b"event: " + name.encode() + b"\n"
    yield from _encode(event)


def _one_line(json: bytes) -> bytes:
    if not json.isascii():
        for raw, escaped in LINE_ENDS:
            json = json.replace(raw, escaped)
    return json


@final
class EventForm:
    """An event of which only some values change from one time to the next. The JSON of all others is made once."""

    GAP = "\0 gap"
    """Stands for such a value."""

    def __init__(self, event: Event, *, named: bool = False) -> None:
        """`named` as in `respond_with_events`."""
        whole = b"".join(_encode_named(event) if named else _encode(event))
        self._form = whole.replace(b"%", b"%%").replace(msgspec.json.encode(self.GAP), b"%b")

    def fill(self, *values: str | float | Sequence[int]) -> bytes:
        """The event with these values, in the order of their gaps."""
        return self._form % tuple([_one_line(msgspec.json.encode(value)) for value in values])
