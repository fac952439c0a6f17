"""Who asks: a key's tenant, and one HTTP request of it that generates."""

import dataclasses
import hashlib
import uuid
from typing import Annotated, final

from fastapi import Depends, Request
from starlette.types import Scope

from jsg.server.observer import Observer


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as its key tells.

    Attributes:
        tenant: Names what is the caller's own: its requests, its stored responses, its cached prefixes. Empty where
            the server has no keys. It says nothing of the key.
        is_admin: Whether it may touch what is not its own.
    """

    tenant: str = ""
    is_admin: bool = True

    def namespace(self, cache_salt: str | None = None, extra_key: str | None = None) -> str:
        """The part of the prefix cache that its requests share: nobody can name another tenant's.

        A digest, so that what clients chose as a secret salt is in no dump, and no choice of words makes two equal.
        """
        if not self.tenant and cache_salt is None and extra_key is None:
            return ""
        parts = [self.tenant, *(["-", ""] if cache_salt is None else ["+", cache_salt])]
        parts += ["-", ""] if extra_key is None else ["+", extra_key]
        joined = b"".join(len(raw).to_bytes(8, "big") + raw for raw in (part.encode() for part in parts))
        return hashlib.sha256(joined).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall:
    """One HTTP request that generates.

    Attributes:
        caller: Who sent it.
        route: The endpoint, such as "/v1/completions".
        request_id: Names it in headers, logs and traces; sanitised.
        user: The end user whom the client named, for the log.
        observer: Is told of what is generated for it; None where nobody asks.
        is_let_in: It belongs to something that was let in, and goes on with it while the server ends.
    """

    caller: Caller
    route: str
    request_id: str
    user: str | None = None
    observer: Observer | None = None
    is_let_in: bool = False


def caller_of(scope: Scope) -> Caller:
    """Who sent the request of this scope; `access.py` has put it there."""
    return scope.get("state", {}).get("caller", Caller())


async def _current_caller(request: Request) -> Caller:
    return caller_of(request.scope)


async def _current_call(request: Request) -> ApiCall:
    state = request.scope.get("state", {})
    return ApiCall(
        caller=caller_of(request.scope),
        route=request.url.path,
        request_id=state.get("request_id") or uuid.uuid4().hex,
        observer=state.get("exchange"),
    )


CurrentCaller = Annotated[Caller, Depends(_current_caller)]
CurrentCall = Annotated[ApiCall, Depends(_current_call)]
