"""The web application: routes, failures, access, names of requests."""

from typing import final

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from jsg.config import ServerConfig
from jsg.errors import ConfigError
from jsg.server.anthropic import messages as anthropic_messages
from jsg.server.front import FrontDoor
from jsg.server.gate import Gate
from jsg.server.http.access import KeyRing, RequireKey, open_paths
from jsg.server.http.failures import add_failure_handlers
from jsg.server.http.interface import describe
from jsg.server.http.origins import CheckOrigin
from jsg.server.http.root_path import checked_root_path
from jsg.server.native import (
    admin,
    generate,
    health,
    info,
    programs,
    radix,
    rerank,
    score,
    select,
    systemone,
    tokenization,
)
from jsg.server.openai import chat, completions, decisions, embeddings, grammars, models, refused, responses
from jsg.server.openai.response_store import ResponseStore
from jsg.server.page.routes import page_routes
from jsg.server.telemetry import routes as metrics
from jsg.server.telemetry.telemetry import Telemetry


@final
class App(FastAPI):
    """FastAPI behind a gate.

    Attributes:
        gate: Takes every HTTP request.
    """

    gate: Gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI call."""
        await self.gate(scope, receive, send)


def create_app(door: FrontDoor, config: ServerConfig, telemetry: Telemetry | None = None) -> App:
    """The application; it answers 503 until the door has a front. `telemetry` watches its requests."""
    keys, root_path = KeyRing.of(config), checked_root_path(config.root_path)
    if config.kv_events_endpoint is not None and keys.has_several_users:
        raise ConfigError(
            "--kv-events-endpoint tells the tokens of all prompts, but this server has several users' keys; leave it "
            "out, or give all users one key"
        )
    # The interactive pages would load scripts from elsewhere: none. `describe` adds `/openapi.json`.
    app = App(title="jsg", openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.max_request_bytes = config.max_request_bytes
    app.state.strict_fields = config.strict_fields
    app.state.logged_warnings = set()
    app.state.door = door
    app.state.probe = health.EngineProbe()
    app.state.responses = ResponseStore(keys.num_callers)
    app.state.grammars = grammars.KeptGrammars(keys.num_callers)
    # Routes are tried in turn; those that are asked most often come first.
    first = (chat, generate, completions, responses, anthropic_messages, metrics, health, embeddings, programs, select)
    modules = (*first, info, admin, radix, tokenization, score, rerank, systemone, models, decisions, grammars, refused)
    for module in modules:
        app.include_router(module.router)
    describe(app, config)
    page = [] if config.no_page else page_routes()
    app.router.routes.extend(page)
    routes = [route for module in modules for route in module.router.routes]
    if root_path and any(f"{route.path}/".startswith(f"{root_path}/") for route in [*routes, *page]):
        raise ConfigError(f"--root-path {root_path} is where the server has paths of its own; choose another prefix")
    add_failure_handlers(app, routes)
    app.state.telemetry = telemetry = telemetry or Telemetry(config)
    app.gate = Gate(
        app,
        super(App, app).__call__,
        routes,
        root_path=root_path,
        watch=telemetry.watch([*app.routes, *routes]),
        origins=CheckOrigin(config),
        keys=RequireKey(keys, open_paths(config) | {route.path for route in page}),
    )
    return app
