"""Server-sent events, and work that is cancelled when its client leaves."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, final

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jsg.errors import JsgError
from jsg.server.http.failures import INTERNAL_ERROR, told_error

logger = logging.getLogger(__name__)

Event = dict[str, Any]
Events = Event | list[Event]
"""An event, or several that are sent in one piece, which costs little more than one."""

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Of every stream. With the second, nginx and what is built on it pass each event on at once."""
COMMENT = b": still here\n\n"  # clients ignore comments in a stream of events

# Python's `splitlines`, which some clients use, ends lines at these characters; the specification of events does not.
LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")


async def until_disconnect[T](request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Runs the work; when the client leaves first, cancels the work and raises ClientDisconnect.

    The request's body must have been read before, so that the next message from the client says that it left.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def respond_with_events(
    request: Request, events: AsyncGenerator[Events], *, named: bool = False, beat_s: float | None = None
) -> Response:
    """A response that streams the events, at least one.

    It waits for the first event, so that a failure before it is an ordinary HTTP failure. A later failure becomes an
    event in the form of the endpoint; the trace of an unforeseen one goes to the log. When the client leaves, `events`
    is closed at once.

    Args:
        request: The request that is answered.
        events: The events to send.
        named: Each event is named by its `type`, and the last event ends the stream. Otherwise events have no names,
            and `[DONE]` ends the stream.
        beat_s: Seconds between comments in the stream; proxies would take a connection that is silent for long for a
            dead one. None sends no comments.
    """

    async def first_event() -> Events:
        return await anext(events)

    first = await until_disconnect(request, first_event())
    return _EventStream(request.scope, first, events, named=named, beat_s=beat_s)


@final
class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self, scope: Scope, first: Events, events: AsyncGenerator[Events], *, named: bool, beat_s: float | None
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._scope = scope
        self._first = first
        self._events = events
        self._encode = _encode_named if named else _encode
        self._ending = b"" if named else b"data: [DONE]\n\n"
        self._beat_s = beat_s
        self._has_left = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def receive_and_note() -> Message:
            message = await receive()
            self._has_left = message["type"] == "http.disconnect"
            return message

        async with contextlib.aclosing(self._events):
            with contextlib.suppress(ClientDisconnect):
                await until_disconnect(Request(scope, receive_and_note), self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        async def send_body(body: bytes, *, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        event = self._first
        try:
            async with _beating(send_body, self._beat_s):
                while event is not None:
                    some = event if isinstance(event, list) else [event]
                    await send_body(b"".join(map(self._encode, some)))
                    # Neither the next event nor a send to a client that has left needs to wait. Without this line no
                    # other task would run, and nobody would notice that the client has left. One event has all that
                    # a slow client has not read, so making it may take long, and is not done for one that has left.
                    await asyncio.sleep(0)
                    if self._has_left:
                        return
                    event = await anext(self._events, None)
        except Exception as error:
            if not isinstance(error, JsgError):
                logger.exception("a stream was cut short")
                error = JsgError(INTERNAL_ERROR)
            await send_body(self._encode(self._failure(error)))
        await send_body(self._ending, more_body=False)

    def _failure(self, error: JsgError) -> Event:
        body = told_error(self._scope, error)
        # In OpenAI's named events the fields of an error stand at the top.
        is_nameless = self._encode is _encode_named and "type" not in body
        return body["error"] | {"type": "error"} if is_nameless else body


@contextlib.asynccontextmanager
async def _beating(send_body: Callable[[bytes], Awaitable[None]], beat_s: float | None) -> AsyncGenerator[None]:
    """Sends comments in the background. An event is sent in one piece, so no comment comes inside of one."""

    async def beat(every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await send_body(COMMENT)

    if beat_s is None:
        yield
        return
    beating = asyncio.create_task(beat(beat_s))
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


def _encode(event: Event) -> bytes:
    data = msgspec.json.encode(event)
    if not data.isascii():
        for raw, escaped in LINE_ENDS:
            data = data.replace(raw, escaped)
    return b"data: " + data + b"\n\n"


def _encode_named(event: Event) -> bytes:
    name = "error" if "error" in event else event["type"]  # whatever the class of the error is
    return b"event: " + name.encode() + b"\n" + _encode(event)
