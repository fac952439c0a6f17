"""The web application: routes, failures, the key and the size limit."""

import hmac
from typing import final

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from jsg.config import ServerConfig
from jsg.server import native, openai_chat, openai_completions, service_routes
from jsg.server.failures import add_failure_handlers, failure_body, json_response
from jsg.server.front import FrontDoor


def create_app(door: FrontDoor, config: ServerConfig) -> FastAPI:
    """The application; it answers 503 until the door has a front."""
    # Bodies are counted while they are read. The interactive pages would load scripts from elsewhere: none.
    app = FastAPI(title="jsg", docs_url=None, redoc_url=None, max_body_size=config.max_request_bytes)
    app.state.door = door
    for module in (service_routes, native, openai_chat, openai_completions):
        app.include_router(module.router)
    add_failure_handlers(app)
    if config.api_key is not None:
        app.add_middleware(RequireKey, key=config.api_key)
    return app


@final
class RequireKey:
    """Lets a request through with `Authorization: Bearer KEY`; probes need none."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        if scope["type"] != "http" or scope["path"] in service_routes.OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        message = "this server needs a key; send it as 'Authorization: Bearer KEY'"
        body = failure_body(scope["path"], 401, message)
        await json_response(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)
