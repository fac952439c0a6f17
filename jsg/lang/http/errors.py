"""Turns a server's refusal or failure into the exception that the same call raises in this process."""

import json
from collections.abc import Mapping
from typing import Any

from jsg.errors import (
    AbortedError,
    BackendError,
    ContextLengthError,
    EngineDeadError,
    FirstTokenTimeoutError,
    ForbiddenError,
    GrammarError,
    JsgError,
    ModelNotFoundError,
    NotFoundError,
    QueueFullError,
    QueueTimeoutError,
    RateLimitError,
    RequestError,
    ShuttingDownError,
    TimeLimitError,
)

MAX_QUOTED_CHARS = 300
MAX_RETRY_AFTER_CHARS = 9

_BY_NAME: dict[str, type[JsgError]] = {
    kind.__name__: kind
    for kind in (
        *(AbortedError, EngineDeadError, ForbiddenError, NotFoundError, ModelNotFoundError, ShuttingDownError),
        *(QueueFullError, QueueTimeoutError, RateLimitError, TimeLimitError, FirstTokenTimeoutError),
        *(RequestError, ContextLengthError, GrammarError),
    )
}
_BY_TYPE: dict[str, type[JsgError]] = {
    "invalid_request_error": RequestError,
    "authentication_error": ForbiddenError,
    "permission_error": ForbiddenError,
    "rate_limit_error": RateLimitError,
}
"""The types of errors of OpenAI's API, which endpoints under /v1/ use."""
_BY_CODE: dict[str, type[JsgError]] = {"context_length_exceeded": ContextLengthError}
_BY_STATUS: dict[int, type[JsgError]] = {
    **dict.fromkeys((400, 413, 422), RequestError),
    **dict.fromkeys((401, 403), ForbiddenError),
    404: NotFoundError,
    429: RateLimitError,
    499: AbortedError,
    504: TimeLimitError,
}


def failure_of(status: int, body: bytes, retry_after: str | None = None) -> JsgError:
    """Gives the exception for an answer with a status of 400 or more."""
    try:
        error = json.loads(body)["error"]
        message = error["message"]
    except (ValueError, KeyError, TypeError):
        quoted = body[:MAX_QUOTED_CHARS].decode(errors="replace")
        return BackendError(f"the server answered with status {status} and no message of its own: {quoted!r}", status)
    failure = _failure(error, str(message), status)
    if retry_after is not None and retry_after.isdecimal() and len(retry_after) <= MAX_RETRY_AFTER_CHARS:
        failure.retry_after_s = int(retry_after)
    return failure


def failure_in_stream(error: Any) -> JsgError:
    """Gives the exception for an event with an `error`."""
    if not isinstance(error, Mapping):
        return BackendError(f"the server failed in the middle of an answer: {str(error)[:MAX_QUOTED_CHARS]}")
    return _failure(error, str(error.get("message")), None)


def _failure(error: Mapping[str, Any], message: str, status: int | None) -> JsgError:
    kind = _BY_NAME.get(str(error.get("type"))) or _BY_CODE.get(str(error.get("code")))
    if kind is None:
        kind = _BY_TYPE.get(str(error.get("type"))) if status is None else _BY_STATUS.get(status)
    if kind is None:
        return BackendError(message, status)
    param = error.get("param")
    if issubclass(kind, RequestError):
        return kind(message, param if isinstance(param, str) else None)
    return kind(message)
