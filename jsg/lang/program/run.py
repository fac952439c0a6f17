"""One run of an interpreted program: its streams, its body, and its end."""

import asyncio
import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import cast

from jsg.errors import AbortedError
from jsg.lang.program.reading import check_may_block
from jsg.lang.streams.history import History
from jsg.lang.streams.loop import Loop
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable
from jsg.lang.words.backend import Backend, BatchSession, Session
from jsg.lang.words.ir import SamplingArgs

_BODIES: contextvars.ContextVar["tuple[Run, ...]"] = contextvars.ContextVar("jsg_bodies", default=())


class Run:
    """A run, from the first line of the body to the end of all that the body started.

    Attributes:
        stream: The program's own stream.
        backend: The backend of the program and of the programs that it calls.
        history: What happened in it.
        body_error: The error that the body raised.
        returned: What the body returned.
        shared_texts: Texts among the arguments of several runs of the batch that it is in; None where it is in none.
        ended: Is done when the body has ended.
    """

    def __init__(
        self,
        loop: Loop,
        backend: Backend,
        defaults: SamplingArgs,
        num_api_spec_tokens: int | None,
        own_texts: frozenset[str] = frozenset(),
        shared_texts: frozenset[str] | None = None,
    ):
        """`own_texts` are arguments that other runs of the same batch do not have."""

        def open_session() -> Session:
            session = backend.open(num_api_spec_tokens=num_api_spec_tokens)
            if own_texts and hasattr(session, "own_texts"):
                cast(BatchSession, session).own_texts = own_texts
            return session

        self.backend = backend
        self.shared_texts = shared_texts
        caller = calling_run()
        self.history = History(None if caller is None else caller.history)
        self.stream = Stream(loop, open_session, defaults, history=self.history)
        self.body_error: BaseException | None = None
        self.returned = Variable()
        self.ended = Variable()
        self._cancelled: BaseException | None = None
        self._body_loop: asyncio.AbstractEventLoop | None = None
        self._called: set[Run] = set()
        if caller is not None:
            called = caller._called
            called.add(self)
            self.all_ended().when_done(lambda: called.discard(self))
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
            self.history.failed(error, is_new=True)
            is_stop = isinstance(error, KeyboardInterrupt | SystemExit | asyncio.CancelledError)
            told = AbortedError("the program was interrupted") if is_stop else error
            self.returned.fail(told)
            self.cancel(told)
            raise
        finally:
            _BODIES.reset(token)
            self._body_loop = None
            self.stream.close(error=self.body_error)
            self.ended.finish(None)

    def is_in_body(self) -> bool:
        """Says whether the running code is the body, or was called by it."""
        return self in _BODIES.get()

    def is_async_body_here(self) -> bool:
        """Says whether the body is async, and runs on the event loop of this thread."""
        return self._body_loop is not None and self._body_loop is asyncio._get_running_loop()

    def cancel(self, error: BaseException | None = None) -> None:
        """Aborts all that the run, and each program that it called or still calls, has under way."""
        self._cancelled = error = error or AbortedError("the program was cancelled")
        self.stream.cancel(error)
        for called in tuple(self._called):
            called.cancel(error)

    def check_may_block(self) -> None:
        """Raises ProgramError where a wait would block the event loop that does what is waited for."""
        is_async_body = self.is_async_body_here() or is_async_body_here()
        check_may_block(self.stream.runner.loop.loop, is_async_body=is_async_body)

    async def settle(self) -> None:
        """Waits until all is done that the run started, the programs that it called too. Raises nothing of it."""
        await self.all_done().done()

    async def called_ended(self) -> None:
        """Waits for the bodies of the programs that the body called, and for all that they started."""
        for called in tuple(self._called):
            await called.settle()

    def all_done(self) -> Variable:
        """Gives a variable that is done when the body has ended, and all that it and the programs it called started."""
        return self._behind_bodies(lambda run: [each.read("nothing") for each in (run.stream, *run.stream.forks())])

    def all_ended(self) -> Variable:
        """Gives a variable that is done when the run has ended, and each program that it called."""
        return self._behind_bodies(lambda run: [run.stream.ended])

    def _behind_bodies(self, awaited: "Callable[[Run], Sequence[Variable]]") -> Variable:
        """Gives a variable that is done when all of `awaited` is, of this run and of each program that it called.

        Nothing of it calls itself, because programs may be called hundreds deep.

        Args:
            awaited: Gives what is awaited of a run whose body has ended, so that it starts nothing more.
        """
        done, lock, num_missing = Variable(), threading.Lock(), 1

        def count(change: int) -> None:
            nonlocal num_missing
            with lock:
                num_missing += change
                is_last = not num_missing
            if is_last:
                done.finish(None)

        def visit(first: Run) -> None:
            runs = [first]
            while runs:
                run = runs.pop()
                if not run.ended.is_done:
                    run.ended.when_done(functools.partial(visit, run))
                    continue
                variables, called = awaited(run), tuple(run._called)
                count(len(variables) + len(called))
                for variable in variables:
                    variable.when_done(functools.partial(count, -1))
                runs.extend(called)
                count(-1)

        visit(self)
        return done


def calling_run() -> Run | None:
    """Gives the run of the program whose body runs, or None."""
    bodies = _BODIES.get()
    return bodies[-1] if bodies else None


def is_async_body_here() -> bool:
    """Says whether the running code was called by an async body that runs on the event loop of this thread."""
    return any(run.is_async_body_here() for run in _BODIES.get())
