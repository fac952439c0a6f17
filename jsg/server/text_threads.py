"""Threads for work on text: parsing, templates, tokens. Long texts have their own: short ones never wait for them."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import final

LONG_BYTES = 2**17  # takes some 30 ms; a thread that is busy for longer is one of those for long texts


@final
class TextThreads:
    """Runs work beside the event loop.

    Long work has a quarter of the cores: whoever sends many long texts waits for his own, and the cores that the event
    loop and short texts need stay free.
    """

    def __init__(self) -> None:
        num_cores = os.cpu_count() or 1
        self._short = ThreadPoolExecutor(num_cores + 2, "jsg-text")
        self._long = ThreadPoolExecutor(max(1, num_cores // 4), "jsg-long-text")

    async def run[T](self, work: Callable[[], T], num_bytes: int) -> T:
        """What the work gives, or raises.

        Args:
            work: Touches nothing that others change.
            num_bytes: About the size of the texts, or of the body that they came in.
        """
        pool = self._long if num_bytes > LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    def close(self) -> None:
        """Forgets what has not begun and waits for nothing."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
