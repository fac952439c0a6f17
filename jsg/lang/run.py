"""One run of an interpreted program: its streams, its body, and its end."""

import asyncio
import contextlib
import contextvars
from collections.abc import Iterator

from jsg.errors import AbortedError, ProgramError
from jsg.lang.backend import Backend
from jsg.lang.ir import SamplingArgs
from jsg.lang.streams.loop import Loop
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable

_BODIES: contextvars.ContextVar["tuple[Run, ...]"] = contextvars.ContextVar("jsg_bodies", default=())


class Run:
    """A run, from the first line of the body to the end of all that the body started.

    Attributes:
        stream: The program's own stream.
        backend: The backend of the program and of the programs that it calls.
        body_error: The error that the body raised.
        ended: Is done when the body has ended.
    """

    def __init__(self, loop: Loop, backend: Backend, defaults: SamplingArgs, num_api_spec_tokens: int | None):
        self.backend = backend
        self.stream = Stream(loop, lambda: backend.open(num_api_spec_tokens=num_api_spec_tokens), defaults)
        self.body_error: BaseException | None = None
        self.ended = Variable()
        self._cancelled: BaseException | None = None
        self._body_loop: asyncio.AbstractEventLoop | None = None
        self._called: set[Run] = set()
        callers = _BODIES.get()
        if callers:
            caller, called = callers[-1], callers[-1]._called
            called.add(self)
            self.stream.ended.when_done(lambda: called.discard(self))
            if caller._cancelled is not None:  # after the entry above, which a cancel that comes now finds
                self.cancel(caller._cancelled)

    @contextlib.contextmanager
    def body(self, loop: asyncio.AbstractEventLoop | None = None) -> Iterator[None]:
        """Surrounds the body. The streams end with it, at once if it raises.

        Args:
            loop: The loop of an async body.
        """
        self._body_loop = loop
        token = _BODIES.set((*_BODIES.get(), self))
        try:
            yield
        except BaseException as error:
            self.body_error = error
            is_stop = isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError)
            self.cancel(AbortedError("the program was interrupted") if is_stop else error)
            raise
        finally:
            _BODIES.reset(token)
            self._body_loop = None
            self.stream.close(error=self.body_error)
            self.ended.finish(None)

    def is_in_body(self) -> bool:
        """Says whether the running code is the body, or was called by it."""
        return self in _BODIES.get()

    def cancel(self, error: BaseException | None = None) -> None:
        """Aborts all that the run, and each program that it called or still calls, has under way."""
        self._cancelled = error = error or AbortedError("the program was cancelled")
        self.stream.cancel(error)
        for called in tuple(self._called):
            called.cancel(error)

    def check_may_block(self) -> None:
        """Raises ProgramError where a wait would block the event loop that does what is waited for."""
        running = asyncio._get_running_loop()
        if running is None:
            return
        is_async_body = any(run._body_loop is running for run in (self, *_BODIES.get()))
        if is_async_body or running is self.stream.runner.loop.loop:
            raise ProgramError(
                "reading waits, and would stop the event loop: in an async program write `await s.aget(name)`, "
                "`await s.atext()`, `await s.settle()`, `async for ... in s.text_async_iter()`"
            )

    async def settle(self) -> None:
        """Waits until all is done that the run started. Raises nothing of what failed."""
        for stream in self._streams():
            with contextlib.suppress(Exception):
                await stream.read("nothing").get()

    def _streams(self) -> Iterator[Stream]:
        waiting = [self.stream]
        while waiting:
            stream = waiting.pop()
            yield stream
            waiting.extend(stream.children())


def calling_backend() -> Backend | None:
    """Gives the backend of the program whose body runs, or None."""
    bodies = _BODIES.get()
    return bodies[-1].backend if bodies else None
