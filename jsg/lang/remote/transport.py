"""How the packages of OpenAI and Anthropic, which are of one make, report failures."""

import sys
from typing import Any

from jsg.lang.remote.retry import is_passing, retry_after_s
from jsg.lang.remote.wire import Failure

_PASSING_TYPES = frozenset(
    {"overloaded_error", "rate_limit_error", "api_error", "timeout_error", "server_error", "rate_limit_exceeded"}
)


def transport_errors() -> tuple[type[Exception], ...]:
    """What breaks through while a stream is read: errors of the HTTP packages that are loaded."""
    loaded = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return tuple(module.HTTPError for module in loaded)


def explain(error: Exception) -> Failure:
    """What an error of such a package, or of HTTP below it, means."""
    response = getattr(error, "response", None)
    status = getattr(error, "status_code", None)
    message = " ".join(str(getattr(error, "message", None) or error or type(error).__name__).split())[:2000]
    if response is not None and status is not None and status >= 400:
        headers = response.headers
        return Failure(f"HTTP {status}: {message}", status, is_passing(status, headers), retry_after_s(headers))
    body = getattr(error, "body", None)
    if body is not None:  # an event of a stream
        return Failure(message, None, _type_of(body) in _PASSING_TYPES)
    cause = f" ({type(error.__cause__).__name__})" if error.__cause__ is not None else ""
    return Failure(f"{message}{cause}", None, is_passing=True)  # no connection, or a time-out


def _type_of(body: Any) -> Any:
    """What an error calls itself; Anthropic's is inside of another object."""
    if not isinstance(body, dict):
        return None
    inner = body.get("error")
    return inner.get("type") if isinstance(inner, dict) else body.get("type")
