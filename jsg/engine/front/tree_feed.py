"""Keeps a copy of an engine's radix tree while somebody looks at it. All who look share one copy."""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Iterator
from typing import Any, Protocol, final

from jsg.cache.tree_log import STOP
from jsg.engine.front.tree_copy import Change, TreeCopy
from jsg.errors import JsgError, QueueFullError

logger = logging.getLogger(__name__)

LOOK_S = 0.1
WALK_S = 0.01  # between looks while the copy is not whole
MAX_LISTENERS = 16
MAX_OF_ONE = 4
"""The most readers with one key, so that a key leaves room for others."""
KEEP_S = 5.0  # how long the copy is kept for the next who looks


class Ask(Protocol):
    """`EngineClient.watch_cache`."""

    def __call__(self, cursor: int, *, with_tokens: bool = False) -> Awaitable[dict[str, Any]]:
        """The news since that cursor."""
        ...


class Listener(Protocol):
    """Somebody who looks.

    Attributes:
        wants_tokens: Whether nodes must have their tokens.
        owner: Whose reader it is, of which only a few may look at the same time; None for an admin's.
    """

    wants_tokens: bool
    owner: str | None

    def on_look(self, changes: list[Change] | None) -> None:
        """The copy is whole and was brought up to date by these changes; None if by others than changes."""
        ...

    def on_error(self, error: Exception) -> None:
        """The engine told nothing, and will not."""
        ...


@final
class TreeFeed:
    """Asks the engine for news while there are listeners, and tells it when there are none any more.

    Attributes:
        copy: The tree, while somebody looks.
        secret: For readers who must not learn the numbers of the nodes.
    """

    def __init__(self, ask: Ask) -> None:
        self.copy = TreeCopy()
        self.secret = secrets.token_bytes(16)
        self._ask = ask
        self._listeners: list[Listener] = []
        self._arrived = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def listening(self, listener: Listener) -> Iterator[None]:
        """Tells `listener` of each look meanwhile. Raises QueueFullError where too many listen."""
        if len(self._listeners) >= MAX_LISTENERS:
            raise QueueFullError(
                f"at most {MAX_LISTENERS} readers may watch the cache of an engine, and so many do; close one of them, "
                "or try again later"
            )
        owned = sum(other.owner == listener.owner for other in self._listeners)
        if listener.owner is not None and owned >= MAX_OF_ONE:
            raise QueueFullError(
                f"at most {MAX_OF_ONE} readers with one key may watch the cache of an engine, and so many do; close one"
                " of them, or try again later"
            )
        self._listeners.append(listener)
        self._arrived.set()
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._run())
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def _run(self) -> None:
        try:
            while self._listeners:
                await self._look_while_wanted()
                self.copy = TreeCopy()
                await self._ask(STOP)
        except Exception as error:
            self.copy = TreeCopy()
            if not isinstance(error, JsgError):
                logger.exception("the copy of a radix tree could not be kept")
            for listener in [*self._listeners]:
                listener.on_error(error)

    async def _look_while_wanted(self) -> None:
        while self._listeners:
            await self._look()
            if not self._listeners:
                await self._wait_for_arrival(KEEP_S)

    async def _wait_for_arrival(self, most_s: float) -> None:
        self._arrived.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), most_s)

    async def _look(self) -> None:
        listeners = [*self._listeners]
        with_tokens = any(listener.wants_tokens for listener in listeners)
        changes = self.copy.take(await self._ask(self.copy.cursor, with_tokens=with_tokens))
        if self.copy.is_whole:
            for listener in listeners:
                if listener in self._listeners:
                    listener.on_look(changes)
        await self._wait_for_arrival(LOOK_S if self.copy.is_whole else WALK_S)  # who has just come need not wait
