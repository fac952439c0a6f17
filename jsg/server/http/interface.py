"""`/openapi.json`: FastAPI makes it from the endpoints, and this module completes it.

It adds the form of each failure, the events of streams, and the keys. It removes FastAPI's own form of a failure, which
no client of this server ever gets.
"""

import asyncio
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.requests import Request
from starlette.responses import Response

import jsg
from jsg.config import ServerConfig
from jsg.server.http.access import PROBES, has_keys, open_paths
from jsg.server.http.failures import json_response
from jsg.server.http.root_path import checked_root_path

Schema = dict[str, Any]

CLIENT_FAULTS = (
    "400: a field breaks a rule, and the message names both; 401: the key is missing or wrong; 403: the key does not "
    "allow the call; 404: the model, response or path does not exist; 408: the request came too slowly; 413: the body "
    "is too large; 415: the content type is not JSON; 429: the key has too many requests; 431: the headers are too "
    "large"
)
SERVER_FAULTS = (
    "500: the server failed; 503: the server is not ready, is full or is ending, see Retry-After; 504: the answer took "
    "too long"
)
KEYS: Schema = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
EVENT: Schema = {
    "type": "object",
    "description": "A server-sent event; they come if `stream` is true. Only some APIs name their events with `event`.",
    "properties": {
        "event": {"type": "string"},
        "data": {"type": "string", "description": "A JSON object, or `[DONE]` at the end of the stream."},
    },
    "required": ["data"],
}
_TEXT: Schema = {"type": "string"}
_TEXT_OR_NULL: Schema = {"type": ["string", "null"]}


def _failure(fields: Schema, optional: Schema | None = None, **around: Schema) -> Schema:
    known = {**fields, **(optional or {})}
    error = {"type": "object", "properties": known, "required": list(fields), "additionalProperties": False}
    whole = {"error": error, **around}
    return {"type": "object", "properties": whole, "required": list(whole), "additionalProperties": False}


def _flat(fields: Schema, optional: Schema) -> Schema:
    """A failure that also has the fields of its error beside it."""
    whole = _failure(fields, optional, object={"const": "error"}, code={"type": "integer"}, **fields)
    whole["properties"] |= optional
    return whole


FAILURES: dict[str, Schema] = {
    "AnthropicFailure": _failure(
        {"type": _TEXT, "message": _TEXT},
        {"details": {"type": "object"}},
        type={"const": "error"},
        request_id=_TEXT_OR_NULL,
    ),
    "OpenAIFailure": _failure({"message": _TEXT, "type": _TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}),
    "Failure": _flat({"message": _TEXT}, {"type": _TEXT, "param": _TEXT}),
}


def describe(app: FastAPI, config: ServerConfig) -> None:
    """Makes the app answer `/openapi.json` with the completed document."""

    def openapi() -> Schema:
        if app.openapi_schema is None:
            document = get_openapi(title="jsg", version=jsg.__version__, routes=app.routes)
            app.openapi_schema = _complete(document, config)
        return app.openapi_schema

    app.openapi = openapi
    made: list[bytes] = []
    making = asyncio.Lock()

    async def show(_: Request) -> Response:
        async with making:
            if not made:
                made.append(await asyncio.to_thread(lambda: bytes(json_response(openapi()).body)))  # most of a second
                app.openapi_schema = None  # the bytes are enough
        return Response(made[0], media_type="application/json")

    app.add_route("/openapi.json", show, include_in_schema=False)


def _complete(document: Schema, config: ServerConfig) -> Schema:
    if config.root_path:
        document["servers"] = [{"url": checked_root_path(config.root_path)}]
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(FAILURES)
    if has_keys(config):
        components["securitySchemes"] = KEYS
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete_operation(operation, path, schemas)
            if has_keys(config) and path not in open_paths(config):
                operation["security"] = [{name: []} for name in KEYS]
    return document


def _complete_operation(operation: Schema, path: str, schemas: Schema) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    failure = {"application/json": {"schema": {"$ref": f"#/components/schemas/{_failure_name(path)}"}}}
    responses["4XX"] = {"description": CLIENT_FAULTS, "content": failure}
    if path in PROBES:
        responses["503"] = {
            "description": "The server is not ready, and `status` says why.",
            "content": {"application/json": {}},
        }
    responses["5XX"] = {"description": SERVER_FAULTS, "content": failure}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if not path.endswith("/render") and "stream" in schemas.get(body.get("$ref", "").rsplit("/", 1)[-1], {}).get(
        "properties", {}
    ):
        responses["200"]["content"]["text/event-stream"] = {"schema": EVENT}


def _failure_name(path: str) -> str:
    if path.startswith("/v1/messages"):
        return "AnthropicFailure"
    return "OpenAIFailure" if path.startswith("/v1/") else "Failure"
