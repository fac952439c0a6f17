"""A name for each HTTP request: the client's own name where it is harmless, otherwise a new one."""

import re
import uuid
from collections.abc import Sequence
from typing import final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jsg.server.caller import state_of

HARMLESS = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # the name goes into headers, logs and traces


@final
class NameRequests:
    """Puts `request_id` into the state of each request, and into the headers of its response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = state_of(scope)  # it has a name if the connection has refused the body by now
        state["request_id"] = state.get("request_id") or _given(scope) or fresh_request_id()
        named = [(name.encode(), value.encode()) for name, value in request_id_headers(scope).items()]
        await self._app(scope, receive, with_headers(send, named))


def request_id_headers(scope: Scope) -> dict[str, str]:
    """The headers of a response that name its request; Anthropic's clients read another one than OpenAI's."""
    request_id = state_of(scope).get("request_id")
    if request_id is None:
        return {}
    headers = {"x-request-id": request_id}
    return headers | {"request-id": request_id} if scope["path"].startswith("/v1/messages") else headers


def with_headers(send: Send, more: Sequence[tuple[bytes, bytes]]) -> Send:
    """Sends a response with more headers."""

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *more]}
        await send(message)

    return send_with_headers


def fresh_request_id() -> str:
    """A name that no other request has."""
    return uuid.uuid4().hex


def _given(scope: Scope) -> str | None:
    """The client's name for the request; None where it gave none or several, or one that is not harmless."""
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    return given[0] if len(given) == 1 and HARMLESS.fullmatch(given[0]) else None
