"""What the backends on APIs of others have in common."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from jsg.errors import ConfigError, UnsupportedError
from jsg.extras import install_command
from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.caller import MAX_CALLS, Caller
from jsg.lang.remote.chat_session import ChatSession
from jsg.lang.remote.choosing import Chooser, Encoder
from jsg.lang.remote.continuing import Continuer
from jsg.lang.remote.retry import Backoff, RetryPolicy
from jsg.lang.remote.text_session import TextSession
from jsg.lang.remote.usage import Meter, TokenUsage, Usage
from jsg.lang.remote.wire import Api
from jsg.lang.streams.per_loop import PerLoop
from jsg.lang.words.backend import Session


class RemoteBackend:
    """A `Backend` on one API with one model. It remembers nothing of programs outside of their sessions.

    `OpenAI` and `Anthropic` are such backends, which make their API.

    Attributes:
        token_usage: The tokens of all calls since its last `reset()`.
    """

    def __init__(
        self,
        api: Api,
        unsupported: Unsupported,
        policy: RetryPolicy,
        *,
        is_chat: bool,
        model: str,
        encoder: Encoder | None = None,
        max_calls: int = MAX_CALLS,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ):
        if not isinstance(max_calls, int) or isinstance(max_calls, bool) or max_calls < 1:
            raise ConfigError(f"max_calls must be a number of at least 1, but got {max_calls!r}; leave it out for 32")
        self._caller = Caller(api, Backoff(policy), Meter(), sleep, max_calls)
        self._unsupported = unsupported
        self._chooser = Chooser(self._caller, unsupported, encoder)
        self._is_chat = is_chat
        self._model = model
        self.token_usage = TokenUsage(self._caller.meter)

    def open(self, *, num_api_spec_tokens: int | None = None) -> Session:
        """Does what `Backend.open` says."""
        if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
            raise ConfigError(f"num_api_spec_tokens must be at least 1, but got {num_api_spec_tokens}")
        continuer = Continuer(self._caller, self._unsupported, num_api_spec_tokens)
        return ChatSession(continuer, self._chooser) if self._is_chat else TextSession(continuer, self._chooser)

    def usage(self) -> Usage:
        """Gives what all calls have cost so far, and what speculation saved."""
        return self._caller.meter.usage

    def flush_cache(self) -> Any:
        """Raises UnsupportedError: the API gives no access to its cache."""
        raise UnsupportedError(f"{self._caller.api.name} gives no access to its cache")

    @property
    def model_info(self) -> dict[str, Any]:
        """The name of the model, as `model_path`."""
        return {"model_path": self._model}

    async def server_info(self) -> dict[str, Any]:
        """Gives the model, and the other models of the API."""
        return {"model_path": self._model, "api": self._caller.api.name, "models": await self._caller.models()}

    async def close(self) -> None:
        """Closes all connections, of all event loops, those of programs too. A second call does nothing.

        A later call connects again.
        """
        await self._caller.api.close()

    def shutdown(self) -> None:
        """Does the same as `close`, for code that is no coroutine. A `with` block ends with it."""
        self._caller.api.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def options_of(base_url: str | None, api_key: str | None, timeout_s: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Gives the arguments of a client of either package, which makes no retries itself."""
    key = api_key or (None if base_url is None else "none")
    return {"base_url": base_url, "api_key": key, "timeout": timeout_s, "max_retries": 0, **given}


def connect[Client](
    package: str, make: Callable[[], Client], close: Callable[[Client], Awaitable[object]], failure: type[Exception]
) -> PerLoop[Client]:
    """Clients of a package, one for each event loop. Raises ConfigError where the package refuses the options."""
    try:
        make()
    except (failure, TypeError) as error:
        raise ConfigError(f"the {package} package cannot be used like this: {error}") from error
    return PerLoop(make, close)


def missing_package(name: str) -> ConfigError:
    """Gives the error for an optional package that is not installed."""
    return ConfigError(f"this backend needs the package {name}, which is not installed; {install_command(name)}")
