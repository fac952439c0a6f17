"""Objects that belong to one event loop, such as a client, whose connections work only on their own loop."""

import asyncio
import concurrent.futures
import os
import weakref
from collections.abc import Awaitable, Callable
from typing import final

CLOSE_S = 5.0
"""The longest wait for another loop to close its object: the loop may be busy, or about to end."""


@final
class PerLoop[T]:
    """One object for each event loop that asks for it. Any thread may close them all."""

    def __init__(self, make: Callable[[], T], close: Callable[[T], Awaitable[object]]) -> None:
        """Makes no object yet. `close` is awaited on the loop of its object."""
        self._make = make
        self._close = close
        self._things: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[int, T]] = weakref.WeakKeyDictionary()

    def here(self) -> T:
        """Gives the object of the running loop. Makes it at the first call, and again after `close`."""
        loop = asyncio.get_running_loop()
        held = self._things.get(loop)
        if held is None:
            for other in self._loops():
                if other.is_closed():  # its object keeps the loop alive
                    self._things.pop(other, None)
            held = self._things[loop] = (os.getpid(), self._make())
        return held[1]

    async def close(self) -> None:
        """Closes each object on its own loop, in whatever thread that runs. A second call does nothing.

        The object of a loop that does not run stays until that loop calls this.
        """
        closings = [asyncio.wrap_future(future) for future in self._close_elsewhere()]
        await self._close_here()
        if closings:
            done, _ = await asyncio.wait(closings, timeout=CLOSE_S)
            for closing in done:
                if not closing.cancelled():  # else its loop has ended, and the object with it
                    closing.result()

    def shutdown(self) -> None:
        """Does the same as `close`, for code that is no coroutine.

        A coroutine may call it too, but the object of its loop is closed only when the coroutine awaits something.
        """
        futures = self._close_elsewhere()
        loop = asyncio._get_running_loop()
        if loop is not None and loop in self._things:
            self._submit(loop)
        for future in concurrent.futures.wait(futures, CLOSE_S).done:
            if not future.cancelled():
                future.result()

    def _close_elsewhere(self) -> list[concurrent.futures.Future[None]]:
        """Has all other running loops close their objects."""
        here = asyncio._get_running_loop()
        futures = [self._submit(loop) for loop in self._loops() if loop is not here and loop.is_running()]
        return [future for future in futures if future is not None]

    def _submit(self, loop: asyncio.AbstractEventLoop) -> concurrent.futures.Future[None] | None:
        closing = self._close_here()
        try:
            return asyncio.run_coroutine_threadsafe(closing, loop)
        except RuntimeError:  # the loop has been closed meanwhile
            closing.close()
            return None

    async def _close_here(self) -> None:
        held = self._things.pop(asyncio.get_running_loop(), None)
        if held is not None:
            await self._close(held[1])

    def _loops(self) -> list[asyncio.AbstractEventLoop]:
        """Gives the loops that have an object, but none of a parent process: in a fork they only seem to run."""
        loops = [loop for ref in self._things.keyrefs() if (loop := ref()) is not None]
        pid = os.getpid()
        return [loop for loop in loops if self._things.get(loop, (0,))[0] == pid]
