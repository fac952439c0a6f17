"""Threads for parsing, templates, tokens and pictures. Long work has its own threads: short texts never wait for it."""

import asyncio
import functools
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import final

from jsg.errors import QueueFullError
from jsg.malloc import trim
from jsg.waits import WaitReason, waiting

INLINE_BYTES = 2**10  # take less time than to hand them to a thread
PICTURE_BYTES = 2**11  # of a text that takes as long to read as a picture to put into a prompt
LONG_BYTES = 2**17  # take about 30 ms; larger texts go to the threads for long work
LARGE_BYTES = 2**20
"""After larger texts the C library's free pages are given back: `tokenizers` needs some 130 bytes for each byte, and a
text of 4 MB left 500 MB in the heap of its thread. Giving them back takes 0.08 s."""
SWITCH_S = 0.001
"""How long a thread keeps the interpreter while the event loop wants it. The loop has to ask again after each call of
the system, so with Python's own 0.005 a turn of many writes was late by several times that."""
MAX_MEDIA = 2048  # a program may have a thousand branches, each with its pictures


@final
class TextThreads:
    """Runs work beside the event loop.

    Long work gets a quarter of the cores. Whoever sends many long texts waits for them, and the cores that the event
    loop and short texts need stay free. Pictures get a quarter of the cores too: decoding a file of a few kilobytes may
    take a second and hundreds of megabytes, and few threads bound that memory.
    """

    def __init__(self) -> None:
        sys.setswitchinterval(SWITCH_S)
        num_cores = os.cpu_count() or 1
        self._short = ThreadPoolExecutor(num_cores + 2, "jsg-text")
        self._long = ThreadPoolExecutor(max(1, num_cores // 4), "jsg-long-text")
        self._num_media = 0
        self._media = ThreadPoolExecutor(max(1, num_cores // 4), "jsg-media")

    async def run[T](self, work: Callable[[], T], num_bytes: int) -> T:
        """Runs work; returns its result, or raises what it raises. Short work is done at once.

        Args:
            work: It must not touch anything that other threads change.
            num_bytes: The approximate size of the texts, or of the body that they came in.
        """
        if num_bytes <= INLINE_BYTES:
            return work()
        pool = self._long if num_bytes > LONG_BYTES else self._short
        begun = functools.partial(_then_trim, work) if num_bytes > LARGE_BYTES else work
        with waiting(WaitReason.TEXT):
            return await asyncio.get_running_loop().run_in_executor(pool, begun)

    async def decode[T](self, work: Callable[[], T]) -> T:
        """Runs work on pictures and videos, which must not touch anything that other threads change.

        Raises QueueFullError where `MAX_MEDIA` requests, each with its files, are being decoded or wait.
        """
        if self._num_media >= MAX_MEDIA:
            raise QueueFullError(
                f"at most {MAX_MEDIA} requests may wait for their pictures and videos, but as many do already; try "
                "again later"
            )
        self._num_media += 1
        try:
            with waiting(WaitReason.MEDIA):
                return await asyncio.get_running_loop().run_in_executor(self._media, work)
        finally:
            self._num_media -= 1

    def close(self) -> None:
        """Drops work that has not begun, and does not wait for the rest."""
        for pool in (self._short, self._long, self._media):
            pool.shutdown(wait=False, cancel_futures=True)


def _then_trim[T](work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        trim()
