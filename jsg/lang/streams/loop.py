"""The event loop on which programs run: one daemon thread for the process, or a loop that runs already.

Backends live on that loop and nothing else of a user runs there, so a program that waits never keeps another one from
going on.
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
    """An event loop to which every thread may hand calls; a burst of calls wakes it once.

    Invariant: while `_posted` is not empty a drain is scheduled or under way.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, thread_id: int):
        self.loop = loop
        self._thread_id = thread_id
        self._posted: collections.deque[Callable[[], object]] = collections.deque()
        self._is_scheduled = False

    def is_here(self) -> bool:
        """Whether the calling thread is the loop's own."""
        return threading.get_ident() == self._thread_id

    def post(self, call: Callable[[], object]) -> None:
        """Has the loop make a call soon, after those posted before, in a context of its own.

        What a call starts serves many: a connection that is opened for one program is used by others, too.
        """
        self._posted.append(call)
        # Two threads that both see False schedule two drains, of which one finds nothing: cheaper than a lock.
        if not self._is_scheduled:
            self._is_scheduled = True
            call_soon = self.loop.call_soon if self.is_here() else self.loop.call_soon_threadsafe
            call_soon(self._drain, context=contextvars.Context())

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs a coroutine there, in a context of its own; cancelling the future cancels it."""
        return contextvars.Context().run(asyncio.run_coroutine_threadsafe, coroutine, self.loop)

    def _drain(self) -> None:
        self._is_scheduled = False
        while self._posted:
            call = self._posted.popleft()
            try:
                call()
            except Exception as error:  # one program's fault must not lose the calls of the others
                context = {"message": "a call posted to jsg's loop failed", "exception": error}
                self.loop.call_exception_handler(context)


def running_loop() -> Loop:
    """The loop that runs in this thread, for programs that are to run there."""
    return Loop(asyncio.get_running_loop(), threading.get_ident())


_shared: Loop | None = None
_shared_pid = 0
_shared_lock = threading.Lock()


def shared_loop() -> Loop:
    """The process's loop for programs; its daemon thread starts when it is first asked for."""
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
    """A future's result; when the wait is interrupted the coroutine behind it is cancelled."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
