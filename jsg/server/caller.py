"""The caller of a request, as its key tells, and one HTTP request that generates."""

import dataclasses
import hashlib
import secrets
from typing import Annotated, Any, final

from fastapi import Depends, Request
from starlette.types import Scope

from jsg.server.observer import Observer


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, as its key tells.

    Attributes:
        tenant: The owner of the caller's requests, stored responses and cached prefixes. Empty where there is only
            one user, with a key or without. It does not show the key.
        is_admin: Whether the caller may touch what belongs to others.
        key: The name of the key, for the log; None for one who has none.
    """

    tenant: str = ""
    is_admin: bool = True
    key: str | None = None

    def namespace(self, cache_salt: str | None = None, extra_key: str | None = None) -> str:
        """The namespace of the prefix cache that the caller's requests share. Nobody can name another tenant's.

        It is a digest, so that no dump shows a salt, which may be a secret, and no choice of salts makes two namespaces
        equal.
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
        user: The end user, as the client named it, for the log.
        observer: Observes what is generated for this request; None for nobody.
        is_let_in: The call belongs to a program that was let in, and may enter while the server ends.
        post: Marks what is generated for it, as in `jsg.types.Request`. No client can name the post of another.
    """

    caller: Caller
    route: str
    user: str | None = None
    observer: Observer | None = None
    is_let_in: bool = False
    post: str = dataclasses.field(default_factory=lambda: secrets.token_hex(16))


def state_of(scope: Scope) -> dict[str, Any]:
    """What is kept for the time of one request. A scope that nothing has been kept for has none yet."""
    return scope.setdefault("state", {})


def caller_of(scope: Scope) -> Caller:
    """Who sent the request of this scope; `access.py` puts the caller there."""
    return state_of(scope).get("caller", Caller())


async def _current_caller(request: Request) -> Caller:
    return caller_of(request.scope)


async def _current_call(request: Request) -> ApiCall:
    exchange = state_of(request.scope).get("exchange")
    return ApiCall(caller=caller_of(request.scope), route=request.scope["path"], observer=exchange)


CurrentCaller = Annotated[Caller, Depends(_current_caller)]
CurrentCall = Annotated[ApiCall, Depends(_current_call)]
