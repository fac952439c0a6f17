"""HEAD for every endpoint that takes GET."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send


async def answer_head(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers HEAD with the status and the headers of GET, and without a body. It allows what GET allows."""
    has_headers = asyncio.Event()

    async def send_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send({"type": "http.response.body", "body": b""})
            has_headers.set()

    async def receive_until_headers() -> Message:
        """What the client sends; once it has the headers it counts as gone, which ends an endless stream."""
        if has_headers.is_set():
            return {"type": "http.disconnect"}
        receiving, answered = asyncio.ensure_future(receive()), asyncio.ensure_future(has_headers.wait())
        try:
            await asyncio.wait({receiving, answered}, return_when=asyncio.FIRST_COMPLETED)
            return receiving.result() if receiving.done() else {"type": "http.disconnect"}
        finally:
            receiving.cancel()
            answered.cancel()

    await app({**scope, "method": "GET"}, receive_until_headers, send_headers)
