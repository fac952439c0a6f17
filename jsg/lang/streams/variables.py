"""A variable of a program: it is set once, awaited from any thread or event loop, and its text is readable as it grows.

A callback tells each reader, so that nothing polls and no thread waits for a task.
"""

import asyncio
import collections
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any

Callback = Callable[[], object]


class Variable:
    """A value that a program will have.

    Invariants: pieces are only appended, and none after it is done. It is done once, with a value or an error.

    Attributes:
        is_done: Whether it has its value or its error.
        is_wanted: Whether anybody waits for it, or has waited.
        meta: The report of the backend; None before it is done, and where no call of a model set it.
    """

    __slots__ = (
        "_error",
        "_lock",
        "_on_change",
        "_on_done",
        "_on_wanted",
        "_pieces",
        "_traceback",
        "_value",
        "is_done",
        "is_wanted",
        "meta",
    )

    def __init__(self, on_wanted: Callback | None = None):
        """`on_wanted` is called, from any thread, when a reader begins to wait."""
        self.is_done = False
        self.is_wanted = False
        self.meta: dict[str, Any] | None = None
        self._value: Any = None
        self._error: BaseException | None = None
        self._traceback: TracebackType | None = None
        self._pieces: list[str] = []
        self._on_wanted = on_wanted
        self._on_done: list[Callback] = []
        self._on_change: list[Callback] = []
        self._lock = threading.Lock()

    # For the interpreter.

    def add(self, text: str) -> None:
        """Appends a piece of text."""
        self._pieces.append(text)
        if self._on_change:
            self.touch()

    def touch(self) -> None:
        """Lets those that follow its text look again."""
        with self._lock:
            callbacks, self._on_change = self._on_change, []
        _call_back(callbacks)

    def finish(self, value: Any, meta: dict[str, Any] | None = None) -> None:
        """Sets the value. Does nothing where the variable is done."""
        self._end(value, None, meta)

    def fail(self, error: BaseException) -> None:
        """Lets each read raise `error`. Does nothing where the variable is done."""
        self._end(None, error, None)

    def finish_as(self, source: "Variable") -> None:
        """Ends it as another one ends, when that one ends."""
        source.when_done(lambda: self._end(source._value, source.error, source.meta))

    def _end(self, value: Any, error: BaseException | None, meta: dict[str, Any] | None) -> None:
        with self._lock:
            if self.is_done:
                return
            self._value, self._error, self.meta = value, error, meta
            self._traceback = None if error is None else error.__traceback__
            self.is_done = True
            callbacks = [*self._on_done, *self._on_change]
            self._on_done, self._on_change, self._on_wanted = [], [], None
        _call_back(callbacks)

    # For readers.

    @property
    def error(self) -> BaseException | None:
        """The error that reading it raises, once it is done."""
        return self._error

    @property
    def num_pieces(self) -> int:
        """The number of pieces of text so far."""
        return len(self._pieces)

    def pieces(self, start: int = 0) -> Sequence[str]:
        """Gives the pieces so far, from one on."""
        return self._pieces[start:]

    def now(self) -> Any:
        """Gives the value of a done variable, or raises its error."""
        assert self.is_done
        if self._error is not None:
            raise self._error.with_traceback(self._traceback)  # else the trace would grow with each read
        return self._value

    def want(self) -> None:
        """Says that a reader waits."""
        if not self.is_wanted:
            self.is_wanted = True
            on_wanted = self._on_wanted
            if on_wanted is not None:
                _call_back((on_wanted,))

    def when_done(self, callback: Callback) -> None:
        """Calls back once, from any thread; at once where the variable is done."""
        with self._lock:
            if not self.is_done:
                self._on_done.append(callback)
                return
        callback()

    def wait_done(self, timeout: float | None = None) -> None:
        """Waits until it is done, by a value or an error; blocks the thread.

        Raises:
            TimeoutError: It was not done within `timeout` seconds.
        """
        if not self.is_done:
            self.want()
            done = threading.Event()
            self.when_done(done.set)
            try:
                if not done.wait(timeout):
                    raise TimeoutError(f"the variable was not set within {timeout} s")
            finally:
                self._forget(done.set)

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the value, and gives it; blocks the thread. Raises TimeoutError as `wait_done` does."""
        self.wait_done(timeout)
        return self.now()

    async def done(self) -> None:
        """Waits until it is done, by a value or an error."""
        if not self.is_done:
            self.want()
            future, callback = _woken()
            self.when_done(callback)
            try:
                await future
            finally:
                self._forget(callback)

    async def get(self) -> Any:
        """Waits for the value, and gives it."""
        await self.done()
        return self.now()

    def follow(self, until: "Variable | None" = None) -> Iterator[str]:
        """Gives the pieces as they come, and blocks the thread between them. Raises the error at the end.

        Args:
            until: Its value is the number of pieces after which to end, once it is done.
        """
        seen = 0
        while True:
            is_done, new = self._read(seen, until)
            seen += len(new)
            yield from new
            if is_done:
                (self if until is None else until).now()
                return
            changed = threading.Event()
            if self._watch(changed.set, seen, until):
                try:
                    changed.wait()
                finally:
                    self._forget(changed.set)

    async def follow_async(self, until: "Variable | None" = None) -> AsyncIterator[str]:
        """Gives the same as `follow`, for tasks of any loop."""
        async for piece in self.grow_async(until):
            yield piece
        (self if until is None else until).now()

    async def grow_async(self, until: "Variable | None" = None) -> AsyncIterator[str]:
        """Gives the same as `follow_async`, but ends without an error: the reader looks at `error`."""
        seen = 0
        while True:
            is_done, new = self._read(seen, until)
            seen += len(new)
            for piece in new:
                yield piece
            if is_done:
                return
            future, callback = _woken()
            if self._watch(callback, seen, until):
                try:
                    await future
                finally:
                    self._forget(callback)

    def _read(self, seen: int, until: "Variable | None") -> tuple[bool, Sequence[str]]:
        if until is not None and until.is_done:
            return True, self._pieces[seen:] if until.error is not None else self._pieces[seen : until.now()]
        is_done = self.is_done  # read before the pieces, so that all pieces up to the end are seen
        return is_done and until is None, self._pieces[seen:]

    def _watch(self, callback: Callback, seen: int, until: "Variable | None") -> bool:
        """Calls back at the next change. Gives False, and does not, where a change has come since `seen`."""
        self.want()
        with self._lock:
            self._on_change.append(callback)
        # Looks again after the entry, because a change in between has called nobody back.
        has_ended = self.is_done if until is None else until.is_done
        if len(self._pieces) > seen or has_ended:
            self._forget(callback)
            return False
        return True

    def _forget(self, callback: Callback) -> None:
        with self._lock:
            for callbacks in (self._on_done, self._on_change):
                if callback in callbacks:
                    callbacks.remove(callback)


class _Calling(threading.local):
    """The callbacks of a thread that still wait for their turn; None where it calls none."""

    waiting: "collections.deque[Callback] | None" = None


_calling = _Calling()


def _call_back(callbacks: Iterable[Callback]) -> None:
    """Calls back, one after the other.

    Where a callback sets the next variable, its callbacks wait for their turn: nested, thousands of forks that are
    joined into each other would be too deep for Python.
    """
    if _calling.waiting is not None:
        _calling.waiting.extend(callbacks)
        return
    _calling.waiting = waiting = collections.deque(callbacks)
    try:
        while waiting:
            waiting.popleft()()
    finally:
        _calling.waiting = None


def known(value: Any) -> Variable:
    """Gives a variable that has its value."""
    variable = Variable()
    if isinstance(value, str) and value:
        variable.add(value)
    variable.finish(value)
    return variable


def gather(sources: Sequence[Variable | None]) -> Variable:
    """Gives a variable for the list of all values, with None where there is no source, or for the first error."""
    present = [source for source in sources if source is not None]

    def want() -> None:
        for source in present:
            source.want()

    gathered = Variable(want)
    lock = threading.Lock()
    num_missing = len(present)

    def count() -> None:
        nonlocal num_missing
        with lock:
            num_missing -= 1
            if num_missing:
                return
        error = next((source.error for source in present if source.error is not None), None)
        if error is not None:
            gathered.fail(error)
        else:
            values = [None if source is None else source.now() for source in sources]
            gathered.finish(values, joined_report([None if source is None else source.meta for source in sources]))

    for source in present:
        source.when_done(count)
    return gathered


def joined_report(reports: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Gives the report about a variable of joined branches; None where no call set any of theirs."""
    return {"branches": list(reports)} if any(reports) else None


def _woken() -> tuple[asyncio.Future[None], Callback]:
    """Gives a future of the running loop, and a callback that completes it from any thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def complete() -> None:
        if not future.done():
            future.set_result(None)

    def callback() -> None:
        if asyncio._get_running_loop() is loop:
            complete()
        else:
            with contextlib.suppress(RuntimeError):  # a closed loop waits for nothing
                loop.call_soon_threadsafe(complete)

    return future, callback
