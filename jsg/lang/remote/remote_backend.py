"""What backends that are APIs of others have in common."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, final

from jsg.errors import ConfigError, UnsupportedError
from jsg.lang.backend import Session
from jsg.lang.remote.arguments import Unsupported
from jsg.lang.remote.caller import Caller
from jsg.lang.remote.chat_session import ChatSession
from jsg.lang.remote.choosing import Chooser, Encoder
from jsg.lang.remote.continuing import Continuer
from jsg.lang.remote.retry import Backoff, RetryPolicy
from jsg.lang.remote.text_session import TextSession
from jsg.lang.remote.usage import Meter, Usage
from jsg.lang.remote.wire import Api


@final
class RemoteBackend:
    """A `Backend` over one API with one model. All that it remembers of programs is in their sessions."""

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

    def open(self, num_api_spec_tokens: int | None) -> Session:
        """As `Backend.open`."""
        if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
            raise ConfigError(f"num_api_spec_tokens must be at least 1, but got {num_api_spec_tokens}")
        continuer = Continuer(self._caller, self._unsupported, num_api_spec_tokens)
        return ChatSession(continuer, self._chooser) if self._is_chat else TextSession(continuer, self._chooser)

    def usage(self) -> Usage:
        """What all calls cost so far."""
        return self._caller.meter.usage

    async def flush_cache(self) -> bool:
        """Raises UnsupportedError."""
        raise UnsupportedError(f"{self._caller.api.name} gives no access to its cache")

    async def server_info(self) -> dict[str, Any]:
        """The model, and what else the API offers."""
        return {"model_path": self._model, "api": self._caller.api.name, "models": await self._caller.models()}

    async def close(self) -> None:
        """As `Backend.close`."""
        await self._caller.api.close()

    def shutdown(self) -> None:
        """`close` for code that is no coroutine."""
        self._caller.api.shutdown()
