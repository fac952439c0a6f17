"""Errors → an HTTP status and a body, in the form of the API that was called.

The form is Anthropic's under /v1/messages, OpenAI's under the rest of /v1/, and `{"error": {"message": ...}}`
elsewhere. In the last form jsg's own errors also have a `type` and, where they are about one field, a `param`. Beside
`error`, the body has these fields once more with `object` and `code`, because SGLang writes some errors in the one way
and some in the other.
"""

import asyncio
import dataclasses
import itertools
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from jsg.errors import (
    AbortedError,
    ContextLengthError,
    EngineDeadError,
    FirstTokenTimeoutError,
    ForbiddenError,
    GrammarError,
    JsgError,
    ModelNotFoundError,
    NotFoundError,
    PreviousResponseError,
    QueueFullError,
    QueueTimeoutError,
    RateLimitError,
    RequestError,
    ShuttingDownError,
    TimeLimitError,
)
from jsg.server.caller import state_of
from jsg.server.http.body import ClientNames
from jsg.server.http.validation import describe_invalid

MAX_MESSAGE_CHARS = 1000  # a message quotes what it received
PIECE_BYTES = 2**18  # of a body that are sent in one turn of the event loop
CLIENT_LEFT = 499  # for logs and metrics: the client has left and does not read it
INTERNAL_ERROR = "internal error; the server's log has the cause"

FORESEEN = (JsgError, HTTPException, RequestValidationError, ClientDisconnect)
STATUSES: dict[type[JsgError], int] = {
    AbortedError: CLIENT_LEFT,
    RequestError: 400,
    ForbiddenError: 403,
    NotFoundError: 404,
    RateLimitError: 429,
    QueueFullError: 503,
    ShuttingDownError: 503,
    EngineDeadError: 503,
    TimeLimitError: 504,
}
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
OPENAI_CODES_OF: dict[type[JsgError], str] = {
    AbortedError: "request_aborted",
    ContextLengthError: "context_length_exceeded",
    ModelNotFoundError: "model_not_found",
    PreviousResponseError: "previous_response_not_found",
}
OPENAI_CODES = {401: "invalid_api_key", 404: "not_found", 413: "request_too_large", 429: "rate_limit_exceeded"}
LOG_CODES: dict[type[JsgError], str] = {
    EngineDeadError: "engine_dead",
    FirstTokenTimeoutError: "first_token_timeout",
    GrammarError: "invalid_grammar",
    QueueFullError: "queue_full",
    QueueTimeoutError: "queue_timeout",
    ShuttingDownError: "shutdown",
    TimeLimitError: "request_timeout",
}
"""The codes of the request log for errors that OpenAI's API has no code for. Others have the name of their status."""
ANTHROPIC_DETAILS = {"thread": {"details": {"error_code": "thread_unsupported_request"}}}
"""Faulty field → what tells Anthropic's own clients how to go on: without a thread, and with the whole conversation."""
ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def add_failure_handlers(app: FastAPI, routes: Iterable[BaseRoute] = ()) -> None:
    """Makes every failure of the app, which has these routes, answer in the form of its endpoint."""
    app.state.routes = [route for route in (*app.routes, *routes) if isinstance(route, Route)]
    for kind in (*FORESEEN, Exception):
        app.add_exception_handler(kind, respond_to_failure)


def status_of(error: JsgError) -> int:
    """The HTTP status of an error."""
    for kind, status in STATUSES.items():
        if isinstance(error, kind):
            return status
    return 500


def failure_body(
    path: str, status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """The JSON body of a failure at that path, in the form of the API it belongs to."""
    message = _clean(message)
    if path.startswith("/v1/messages"):
        fallback = "invalid_request_error" if status < 500 else "api_error"
        error = {"type": ANTHROPIC_TYPES.get(status, fallback), "message": message}
        return {"type": "error", "error": error | ANTHROPIC_DETAILS.get(param or "", {})}
    if not path.startswith("/v1/"):
        return _native({"message": message}, status)
    return {
        "error": {
            "message": message,
            "type": OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error"),
            "param": None if param is None else _clean(param),
            "code": code or OPENAI_CODES.get(status),
        }
    }


def error_body(path: str, error: JsgError) -> dict[str, Any]:
    """The JSON body of an error at that path. Our own API names the exception, which `RuntimeEndpoint` raises."""
    message, param = str(error), getattr(error, "param", None)
    body = failure_body(path, status_of(error), message, param, OPENAI_CODES_OF.get(type(error)))
    if not path.startswith("/v1/"):
        named = {"type": type(error).__name__} | ({} if param is None else {"param": _clean(param)})
        return _native(body["error"] | named, status_of(error))
    return body


def _native(error: dict[str, Any], status: int) -> dict[str, Any]:
    return {"error": error, "object": "error", **error, "code": status}


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """What a client is told of a failure, as the state of its request keeps it for the request log.

    Attributes:
        status: The HTTP status; if a stream had begun, the status that the response would have had.
        code: The code in OpenAI's form, or else one of `LOG_CODES`, or else the name of the status.
        message: The message, in which the client may be quoted.
        param: The faulty field.
    """

    status: int
    code: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: JsgError, state: Mapping[str, Any]) -> "Refusal":
        """What a client is told of an error, which from now on has the names of the request with this state."""
        names: ClientNames | None = state.get("client_names")
        if names is not None:
            names.give(error)
        status, kind = status_of(error), type(error)
        code = OPENAI_CODES_OF.get(kind) or OPENAI_CODES.get(status) or LOG_CODES.get(kind) or _name_of(status)
        return cls(status, code, str(error), getattr(error, "param", None))


def told_error(scope: Scope, error: JsgError) -> dict[str, Any]:
    """The body of an error as the client gets it, which the state of the request keeps."""
    state = state_of(scope)
    state.setdefault("refusal", Refusal.of(error, state))
    return _full(scope, error_body(scope["path"], error))


def told_failure(scope: Scope, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The body of a failure that is no `JsgError`, as the client gets it, which the state of the request keeps."""
    refusal = Refusal(status, OPENAI_CODES.get(status) or _name_of(status), message, param)
    state_of(scope).setdefault("refusal", refusal)  # if the connection has refused the body, this is not sent
    return _full(scope, failure_body(scope["path"], status, message, param))


def _name_of(status: int) -> str:
    return HTTPStatus(status).name.lower()


def failure_response(scope: Scope, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """The response of a failure that is no `JsgError`."""
    return json_response(told_failure(scope, status, message), status, headers)


def _full(scope: Scope, body: dict[str, Any]) -> dict[str, Any]:
    """In Anthropic's form the body of a failure names the request."""
    if body.get("type") != "error":
        return body
    return body | {"request_id": state_of(scope).get("request_id")}


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of JSON; numbers that are not finite become null."""
    if isinstance(content, list):  # other threads wait for each call of the encoder
        body = b"[%b]" % b",".join(map(msgspec.json.encode, content))
    else:
        body = msgspec.json.encode(content)
    return _Response(body, status, headers, "application/json")


class _Response(Response):
    """Sends a long body in pieces. To hand megabytes on at once, with a copy in each layer, took 0.06 s."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= PIECE_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        view = memoryview(self.body)
        for start in range(0, len(view), PIECE_BYTES):
            piece, more = bytes(view[start : start + PIECE_BYTES]), start + PIECE_BYTES < len(view)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
            await asyncio.sleep(0)


def _clean(text: str) -> str:
    """The text, cut to `MAX_MESSAGE_CHARS`, without lone surrogates: JSON can contain them, UTF-8 cannot."""
    text = text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."
    return text.encode(errors="replace").decode()


async def respond_to_failure(request: Request, error: Exception) -> Response:
    """The response to a request that failed. Of what nobody foresaw the trace is for the log, not for the client."""
    match error:
        case JsgError():
            headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
            return json_response(told_error(request.scope, error), status_of(error), headers)
        case HTTPException():
            return _of_http_exception(request, error)
        case RequestValidationError():  # of the path or the query; `json_body.py` checks bodies
            errors = [each | {"loc": each["loc"][1:]} for each in error.errors()]
            message, param = describe_invalid(errors, {str(each["loc"][0]): each["input"] for each in errors})
            return json_response(told_failure(request.scope, 400, message, param), 400)
        case ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case _:
            return failure_response(request.scope, 500, INTERNAL_ERROR)


def _methods_of(request: Request) -> str:
    """The methods that the path takes. Starlette's own list has those of one route only."""
    path = request.url.path
    found = (route.methods or () for route in request.app.state.routes if route.path_regex.match(path))
    return ", ".join(sorted(set(itertools.chain.from_iterable(found))))


def _of_http_exception(request: Request, error: HTTPException) -> Response:
    message, headers = error.detail, dict(error.headers or {})
    if error.status_code == 405:
        headers["Allow"] = _methods_of(request)
        message = f"this path does not take {request.method}; use {headers['Allow']}"
    elif error.status_code == 404:
        message = "the path must name an endpoint, but none has this path; /openapi.json lists all endpoints"
    return failure_response(request.scope, error.status_code, message, headers)
