"""What the packages of OpenAI and Anthropic, which are made alike, have in common."""

import sys
from typing import Any

from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.retry import is_passing, retry_after_s
from jsg.lang.remote.wire import Abilities, Failure
from jsg.lang.streams.per_loop import PerLoop

_PASSING_TYPES = frozenset(
    {"overloaded_error", "rate_limit_error", "api_error", "timeout_error", "server_error", "rate_limit_exceeded"}
)


class PackageApi[Client]:
    """The part of an `Api` that is the same for both packages. `stream` and `score` differ."""

    def __init__(
        self,
        clients: PerLoop[Client],
        model: str,
        unsupported: Unsupported,
        abilities: Abilities,
        failure: type[Exception],
    ):
        self.name = unsupported.backend
        self.abilities = abilities
        # While a stream is read, errors of the HTTP package come through, whichever is loaded.
        loaded = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
        self.failures = (failure, *(module.HTTPError for module in loaded))
        self._clients = clients
        self._model = model
        self._unsupported = unsupported

    def explain(self, error: Exception) -> Failure:
        """As `Api.explain`."""
        return explain(error)

    async def models(self) -> list[Any]:
        """As `Api.models`."""
        client: Any = self._clients.here()
        return [model.model_dump() async for model in await client.models.list()]

    async def close(self) -> None:
        """As `Api.close`."""
        await self._clients.close()

    def shutdown(self) -> None:
        """As `Api.shutdown`."""
        self._clients.shutdown()


def explain(error: Exception) -> Failure:
    """Explains an error of such a package, or of the HTTP package below it."""
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
    return Failure(f"{message}{cause}", None, is_passing=True)  # no connection, or a timeout


def _type_of(body: Any) -> Any:
    """Gives the type of an error, which for Anthropic is inside of another object."""
    if not isinstance(body, dict):
        return None
    inner = body.get("error")
    return inner.get("type") if isinstance(inner, dict) else body.get("type")
