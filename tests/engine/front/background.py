"""An event loop in a thread, so that a client and its processes go on between the tests that share them."""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

RUN_S = 120.0
"""No test takes so long, however busy the machine is."""


class BackgroundLoop:
    """Runs one coroutine after the other for tests; whatever else belongs to the loop goes on meanwhile."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="background loop", daemon=True)
        self._thread.start()

    def run[Result](self, main: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(main, RUN_S), self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def until(condition: Callable[[], bool]) -> None:
    """Waits until something has come about that is sure to."""
    async with asyncio.timeout(RUN_S):
        while not condition():
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def background_loop() -> Iterator[BackgroundLoop]:
    with contextlib.closing(BackgroundLoop()) as loop:
        yield loop
