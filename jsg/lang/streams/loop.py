"""The event loop of programs: the loop of one daemon thread of the process, or a loop that already runs.

Backends run on that loop, and no other code of users does, so a program that waits never blocks another one.
"""

import asyncio
import collections
import concurrent.futures
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any


class Loop:
    """An event loop that takes calls from any thread. Many calls in a row wake it once.

    Invariant: while `_posted` is not empty, a drain is scheduled or under way.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread_id: int):
        self.loop = loop
        self._thread_id = thread_id
        self._posted: collections.deque[Callable[[], object]] = collections.deque()
        self._is_scheduled = False

    def is_here(self) -> bool:
        """Says whether the calling thread is that of the loop."""
        return threading.get_ident() == self._thread_id

    def post(self, call: Callable[[], object]) -> None:
        """Lets the loop make a call soon, after all calls that were posted before, in a context of its own.

        The context is not the caller's, because other programs use what a call starts, such as a connection.
        """
        self._posted.append(call)
        # Two threads that both see False schedule two drains, one of which finds nothing. A lock would cost more.
        if not self._is_scheduled:
            self._is_scheduled = True
            call_soon = self.loop.call_soon if self.is_here() else self.loop.call_soon_threadsafe
            call_soon(self._drain, context=contextvars.Context())

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine on the loop, in a context of its own. Cancelling the future cancels the coroutine."""
        return contextvars.Context().run(asyncio.run_coroutine_threadsafe, coroutine, self.loop)

    def _drain(self) -> None:
        self._is_scheduled = False
        while self._posted:
            call = self._posted.popleft()
            try:
                call()
            except Exception as error:  # an error of one program must not lose the calls of others
                context = {"message": "a call posted to jsg's loop failed", "exception": error}
                self.loop.call_exception_handler(context)


def running_loop() -> Loop:
    """Gives the loop that runs in this thread."""
    return Loop(asyncio.get_running_loop(), threading.get_ident())


_shared: Loop | None = None
_shared_pid = 0
_shared_lock = threading.Lock()


def shared_loop() -> Loop:
    """Gives the loop of the process for programs. Its daemon thread starts with the first call."""
    global _shared, _shared_pid
    if _shared is not None and _shared_pid == os.getpid():
        return _shared
    with _shared_lock:
        if _shared is None or _shared_pid != os.getpid():  # a forked process has no threads of its parent
            _shared, _shared_pid = _start(), os.getpid()
        return _shared


def _start() -> Loop:
    ready: concurrent.futures.Future[Loop] = concurrent.futures.Future()

    def serve() -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        ready.set_result(Loop(loop, threading.get_ident()))
        loop.run_forever()

    threading.Thread(target=serve, name="jsg-programs", daemon=True).start()
    return ready.result()


def wait_for[T](future: concurrent.futures.Future[T]) -> T:
    """Gives the result of a future. An interrupt of the wait cancels the coroutine behind it."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
