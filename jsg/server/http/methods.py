"""HEAD for every endpoint that takes GET."""

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

        async def send_headers(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_headers)
