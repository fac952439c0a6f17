"""Threads for parsing, templates, tokens, pictures. Long work has its own: short texts never wait for it."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import final

from jsg.errors import QueueFullError

LONG_BYTES = 2**17  # takes some 30 ms; a thread that is busy for longer is one of those for long texts
MAX_MEDIA = 2048  # a program may have a thousand branches, each with its pictures


@final
class TextThreads:
    """Runs work beside the event loop.

    Long work has a quarter of the cores: whoever sends many long texts waits for his own, and the cores that the event
    loop and short texts need stay free. So have pictures. A file of a few kilobytes may be one that takes a second, and
    hundreds of megabytes while it is decoded; with so few at a time the memory for that has a bound.
    """

    def __init__(self) -> None:
        num_cores = os.cpu_count() or 1
        self._short = ThreadPoolExecutor(num_cores + 2, "jsg-text")
        self._long = ThreadPoolExecutor(max(1, num_cores // 4), "jsg-long-text")
        self._num_media = 0
        self._media = ThreadPoolExecutor(max(1, num_cores // 4), "jsg-media")

    async def run[T](self, work: Callable[[], T], num_bytes: int) -> T:
        """What the work gives, or raises.

        Args:
            work: Touches nothing that others change.
            num_bytes: About the size of the texts, or of the body that they came in.
        """
        pool = self._long if num_bytes > LONG_BYTES else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, work)

    async def decode[T](self, work: Callable[[], T]) -> T:
        """What work on pictures and videos gives, or raises; it touches nothing that others change.

        Raises QueueFullError where `MAX_MEDIA` are under way or wait, each with the files of its request.
        """
        if self._num_media >= MAX_MEDIA:
            raise QueueFullError(
                f"at most {MAX_MEDIA} requests may wait for their pictures and videos, and so many do; try again later"
            )
        self._num_media += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._media, work)
        finally:
            self._num_media -= 1

    def close(self) -> None:
        """Forgets what has not begun and waits for nothing."""
        for pool in (self._short, self._long, self._media):
            pool.shutdown(wait=False, cancel_futures=True)
