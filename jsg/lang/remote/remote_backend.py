"""What backends that are APIs of others have in common."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from jsg.errors import ConfigError, UnsupportedError
from jsg.lang.backend import Session
from jsg.lang.per_loop import PerLoop
from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.caller import Caller
from jsg.lang.remote.chat_session import ChatSession
from jsg.lang.remote.choosing import Chooser, Encoder
from jsg.lang.remote.continuing import Continuer
from jsg.lang.remote.retry import Backoff, RetryPolicy
from jsg.lang.remote.text_session import TextSession
from jsg.lang.remote.usage import Meter, Usage
from jsg.lang.remote.wire import Api


class RemoteBackend:
    """A `Backend` over one API with one model. All that it remembers of programs is in their sessions.

    `OpenAI` and `Anthropic` are this with an API that they make.
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
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ):
        self._caller = Caller(api, Backoff(policy), Meter(), sleep)
        self._unsupported = unsupported
        self._chooser = Chooser(self._caller, unsupported, encoder)
        self._is_chat = is_chat
        self._model = model

    def open(self, *, num_api_spec_tokens: int | None = None) -> Session:
        """As `Backend.open`."""
        if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
            raise ConfigError(f"num_api_spec_tokens must be at least 1, but got {num_api_spec_tokens}")
        continuer = Continuer(self._caller, self._unsupported, num_api_spec_tokens)
        return ChatSession(continuer, self._chooser) if self._is_chat else TextSession(continuer, self._chooser)

    def usage(self) -> Usage:
        """What all calls cost so far, and what speculation saved."""
        return self._caller.meter.usage

    async def flush_cache(self) -> bool:
        """Raises UnsupportedError: the API gives no access to its cache."""
        raise UnsupportedError(f"{self._caller.api.name} gives no access to its cache")

    async def server_info(self) -> dict[str, Any]:
        """The model, and what else the API offers."""
        return {"model_path": self._model, "api": self._caller.api.name, "models": await self._caller.models()}

    async def close(self) -> None:
        """Closes all connections, those of programs too, on whatever loop they are. A second time does nothing.

        Not the end: what is asked of it afterwards connects again.
        """
        await self._caller.api.close()

    def shutdown(self) -> None:
        """`close` for code that is no coroutine. A `with` block ends with it."""
        self._caller.api.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()


def options_of(base_url: str | None, api_key: str | None, timeout_s: float, given: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a client of either package, which is to try nothing again by itself."""
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
    """The error where an optional package is not there."""
    return ConfigError(f"this backend needs the package {name}, which is not installed; pip install 'jsg[{name}]'")
