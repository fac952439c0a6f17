"""A name for each HTTP request: the client's own name where it is harmless, otherwise a new one."""

import re
import secrets

from starlette.types import Scope

from jsg.server.caller import state_of

HARMLESS = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # the name goes into headers, logs and traces


def name_request(scope: Scope) -> None:
    """Puts `request_id` into the state of a request, and into the headers of its response."""
    state = state_of(scope)  # it has a name if the connection has refused the body by now
    state["request_id"] = state.get("request_id") or _given(scope) or fresh_request_id()
    named = request_id_headers(scope).items()
    more_headers_of(scope).extend((name.encode(), value.encode()) for name, value in named)


def more_headers_of(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The headers that the response to a request has besides its own, whatever answers it."""
    return state_of(scope).setdefault("headers", [])


def request_id_headers(scope: Scope) -> dict[str, str]:
    """The headers of a response that name its request; Anthropic's clients read another one than OpenAI's."""
    request_id = state_of(scope).get("request_id")
    if request_id is None:
        return {}
    headers = {"x-request-id": request_id}
    return headers | {"request-id": request_id} if scope["path"].startswith("/v1/messages") else headers


def fresh_request_id() -> str:
    """A name that no other request has."""
    return secrets.token_hex(16)


def _given(scope: Scope) -> str | None:
    """The client's name for the request; None where it gave none or several, or one that is not harmless."""
    given = [value.decode("latin-1") for name, value in scope["headers"] if name == b"x-request-id"]
    return given[0] if len(given) == 1 and HARMLESS.fullmatch(given[0]) else None
