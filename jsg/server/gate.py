"""What every HTTP request passes, in one function, and the short way from there to the endpoints that take a body.

FastAPI has the other endpoints, and describes all of them.
"""

import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, final

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jsg.server.http.access import RequireKey
from jsg.server.http.failures import FORESEEN, respond_to_failure
from jsg.server.http.json_body import JsonRoute
from jsg.server.http.methods import answer_head
from jsg.server.http.origins import CheckOrigin
from jsg.server.http.request_id import more_headers_of, name_request
from jsg.server.http.root_path import strip_root_path
from jsg.server.telemetry.exchange import Exchange, WatchExchanges

Answer = Callable[[Request], Coroutine[Any, Any, Response]]


@final
class Gate:
    """Names, watches and checks a request, and has it answered.

    A direct way to the answer costs nothing for each event of a stream. FastAPI's costs four calls for each.
    """

    def __init__(
        self,
        app: FastAPI,
        others: ASGIApp,
        routes: Sequence[BaseRoute],
        *,
        root_path: str,
        watch: WatchExchanges,
        origins: CheckOrigin,
        keys: RequireKey,
    ) -> None:
        """A gate of an app whose own call is `others`. `root_path` is the prefix below which a proxy shows it."""
        self._app = app
        self._others = others
        self._root_path = root_path
        self._watch = watch
        self._checks = (origins.answer, keys.refusal)
        self._direct: dict[str, Answer] = {
            route.path: route.get_route_handler()
            for route in routes
            if isinstance(route, JsonRoute) and route.body_field is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] != "http":
            await self._others(scope, receive, send)
            return
        if self._root_path and (response := strip_root_path(scope, self._root_path)) is not None:
            await response(scope, receive, send)
            return
        with self._watch.exchange(scope) as exchange:
            name_request(scope)
            noted = functools.partial(_send, scope, exchange, send)
            for check in self._checks:
                if (response := check(scope)) is not None:
                    await response(scope, receive, noted)
                    return
            if scope["method"] == "HEAD":
                await answer_head(self._others, scope, receive, noted)
            elif scope["method"] == "POST" and (answer := self._direct.get(scope["path"])) is not None:
                await self._answer(answer, scope, receive, noted, exchange)
            else:
                await self._others(scope, receive, noted)

    async def _answer(self, answer: Answer, scope: Scope, receive: Receive, send: Send, exchange: Exchange) -> None:
        scope["app"] = self._app
        request = Request(scope, receive)
        try:
            response = await answer(request)
            await response(scope, receive, send)
        except Exception as error:
            if exchange.status is not None:
                raise
            response = await respond_to_failure(request, error)
            await response(scope, receive, send)
            if not isinstance(error, FORESEEN):
                raise  # for the log
            error.__traceback__ = None  # its frames may have the error


async def _send(scope: Scope, exchange: Exchange, send: Send, message: Message) -> None:
    """Sends a message of a response, whose head gets the headers that all responses have."""
    exchange.note(message)
    if message["type"] == "http.response.start":
        message = {**message, "headers": [*message.get("headers", ()), *more_headers_of(scope)]}
    await send(message)
