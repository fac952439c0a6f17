"""HEAD for every endpoint that takes GET."""

import asyncio
from typing import final

from starlette.types import ASGIApp, Message, Receive, Scope, Send


@final
class HeadAsGet:
    """Answers HEAD with the status and the headers of GET, and without a body. It allows what GET allows."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

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

        await self._app({**scope, "method": "GET"}, receive_until_headers, send_headers)
