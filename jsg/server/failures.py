"""What goes wrong → an HTTP status and a body: OpenAI's form under /v1/, `{"error": {"message": ...}}` elsewhere."""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jsg.errors import EngineDeadError, JsgError, NotFoundError, QueueFullError, RequestError

MAX_MESSAGE_CHARS = 1000  # a message quotes what it received
MAX_QUOTE_CHARS = 100
CLIENT_LEFT = 499  # nobody reads it
OPENAI_NAMES = {  # of our fields that go by another name under /v1/
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "input_ids": "prompt",
    "return_logprob": "logprobs",
}


def add_failure_handlers(app: FastAPI) -> None:
    """Makes every failure of the app answer in the form of its endpoint."""
    app.add_exception_handler(JsgError, _on_jsg_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)


def status_of(error: JsgError) -> int:
    """The HTTP status of an error."""
    match error:
        case RequestError():
            return 400
        case NotFoundError():
            return 404
        case QueueFullError() | EngineDeadError():
            return 503
        case _:
            return 500


def failure_body(path: str, status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON body of a failure at that path."""
    message = _clean(message)
    if not path.startswith("/v1/"):
        return {"error": {"message": message}}
    kind = "invalid_request_error" if status < 500 else "server_error"
    codes = {401: "invalid_api_key", 404: "not_found", 413: "request_too_large"}
    return {
        "error": {
            "message": message,
            "type": kind,
            "param": None if param is None else _clean(param),
            "code": codes.get(status),
        }
    }


def error_body(path: str, error: JsgError) -> dict[str, Any]:
    """The JSON body of an error at that path, with the names of fields that clients know there."""
    message, param = str(error), getattr(error, "param", None)
    if path.startswith("/v1/") and param in OPENAI_NAMES:
        message = message.replace(param, OPENAI_NAMES[param])
        param = OPENAI_NAMES[param]
    return failure_body(path, status_of(error), message, param)


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A response of JSON; numbers that are not finite become null."""
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def describe_invalid(errors: list[Any]) -> tuple[str, str | None]:
    """Message and offending field of what pydantic found wrong with a body."""
    first = errors[0]
    location = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return f"the body must be JSON, but it is not: {first['ctx']['error']} at character {location[0]}", None
    if not location:
        return "the body must be a JSON object, sent with 'Content-Type: application/json'", None
    if first["type"] == "missing":
        return f"{'.'.join(location)} is required, but it is missing", location[0]
    rules = dict.fromkeys(str(error["msg"]) for error in errors if error["loc"][:2] == first["loc"][:2])
    quote = repr(first["input"])[: MAX_QUOTE_CHARS + 1]
    quote = quote if len(quote) <= MAX_QUOTE_CHARS else quote[:MAX_QUOTE_CHARS] + "..."
    return f"{location[0]} is not valid: {' or '.join(rules)}; got {quote}", location[0]


def _clean(text: str) -> str:
    """Short, and without the lone surrogates that JSON can bring in and UTF-8 cannot carry out."""
    text = text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."
    return text.encode(errors="replace").decode()


async def _on_jsg_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, JsgError)
    return json_response(error_body(request.url.path, error), status_of(error))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = failure_body(request.url.path, error.status_code, error.detail)
    return json_response(body, error.status_code, dict(error.headers or {}))


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    message, param = describe_invalid(list(error.errors()))
    return json_response(failure_body(request.url.path, 400, message, param), 400)


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _on_bug(request: Request, _error: Exception) -> Response:
    """The trace goes to the log, not to the client."""
    return json_response(failure_body(request.url.path, 500, "internal error; the server's log has the cause"), 500)
