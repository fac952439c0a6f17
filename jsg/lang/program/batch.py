"""Many runs of one program, a bounded number at a time."""

import abc
import asyncio
import collections
import concurrent.futures
import contextlib
import contextvars
import dataclasses
import itertools
import os
import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from jsg.errors import ProgramError
from jsg.lang.program.reading import check_may_block
from jsg.lang.program.run import is_async_body_here
from jsg.lang.program.run_args import BatchArgs
from jsg.lang.streams.loop import shared_loop
from jsg.lang.words.backend import Backend, BackendSource

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Items = Iterable[Mapping[str, Any] | Sequence[Any]]
type Start[State] = Callable[[], Coroutine[Any, Any, State]]
"""Runs an item to its end, and gives its state. Cancelling it cancels the run."""
_UNBOUNDED = 2**62  # started runs whose states a list will hold
_MOST_VALUES = 256  # of the arguments of a run that are looked at for texts, each of which is sought in its prompt
_GENERATOR_WINDOW = 256  # started runs whose states an iterator has not given yet, unless more run at a time


class Batchable[State](abc.ABC):
    """A program that can run once for each item of a batch."""

    @overload
    def run_batch(
        self,
        batch_kwargs: Items,
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[BatchArgs],
    ) -> list[State]: ...

    @overload
    def run_batch(
        self,
        batch_kwargs: Items,
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[True],
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[BatchArgs],
    ) -> Iterator[State]: ...

    def run_batch(
        self,
        batch_kwargs: Items,
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[BatchArgs],
    ) -> list[State] | Iterator[State]:
        """Runs the program once for each item, several at a time; gives the states in the items' order, each ended.

        What fails in an item stays with its state: `states[i].error()`. An interrupt cancels all runs.

        Args:
            batch_kwargs: For each run its keyword arguments as a dict, or its positional arguments as a sequence. All
                items of a list or tuple are checked before one runs. Any other iterable is read as the runs go on, one
                item at a time in a thread of its own, and may have no end with `generator_style`.
            num_threads: Runs under way at a time; "auto" is 96, or 16 per core if that is more, and 512 where the
                program is sent whole.
            progress_bar: Shows how many runs are done.
            generator_style: Gives an iterator. A state comes as soon as its run and those before it are done.
            backend: As in `run`.
            **run_args: As `RunArgs` says, for all runs; a name that is a parameter of the program is given per item.
                A compiled program also takes `where`, as its `run` does.

        Raises:
            ProgramError: An item does not fit the parameters of the program: nothing was run, or of an iterable that
                is read as it goes, the items before. A keyword is an argument of the program. An event loop runs here,
                which the batch would stop: use `arun_batch`.
        """
        work = self._batch(batch_kwargs, backend, dict(run_args))
        if isinstance(work, list):
            return iter(work) if generator_style else work
        advice = "write `await program.arun_batch(...)`"
        check_may_block(shared_loop().loop, is_async_body=is_async_body_here(), advice=advice)
        runs = _Batch(work, num_workers(num_threads, work), progress_bar)
        return runs.iterate() if generator_style else runs.run()

    @overload
    async def arun_batch(
        self,
        batch_kwargs: Items,
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[BatchArgs],
    ) -> list[State]: ...

    @overload
    async def arun_batch(
        self,
        batch_kwargs: Items,
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[True],
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[BatchArgs],
    ) -> AsyncIterator[State]: ...

    async def arun_batch(
        self,
        batch_kwargs: Items,
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[BatchArgs],
    ) -> list[State] | AsyncIterator[State]:
        """As `run_batch`, for tasks; with `generator_style` an asynchronous iterator."""
        work = self._batch(batch_kwargs, backend, dict(run_args))
        if isinstance(work, list):
            return _each(work) if generator_style else work
        runs = _Batch(work, num_workers(num_threads, work), progress_bar)
        return runs.iterate_async() if generator_style else await runs.run_async()

    @abc.abstractmethod
    def _batch(
        self, items: Items, backend: Backend | BackendSource | None, options: dict[str, Any]
    ) -> "Work[State] | list[State]":
        """The runs of the items; in a trace the states themselves. Raises ProgramError."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work[State]:
    """The runs of a batch, in the order of its items.

    Attributes:
        starts: Starts each of them. To draw one may take long where the items are read as the runs go on.
        size: Their number; None where the items are read as the runs go on.
        auto: How many run at a time with `num_threads="auto"`.
    """

    starts: Iterator[Start[State]]
    size: int | None
    auto: int = max(96, 16 * (os.cpu_count() or 1))

    async def draw(self) -> Start[State] | None:
        """Gives the next one, or None where there is no more. Raises what the iterable of the items raises."""
        if self.size is not None:
            return next(self.starts, None)
        drawn: concurrent.futures.Future[Start[State] | None] = concurrent.futures.Future()

        def draw() -> None:
            try:
                start = next(self.starts, None)
            except BaseException as error:  # the task that waits raises it
                with contextlib.suppress(concurrent.futures.InvalidStateError):  # it waits no more
                    drawn.set_exception(error)
            else:
                with contextlib.suppress(concurrent.futures.InvalidStateError):
                    drawn.set_result(start)

        context = contextvars.copy_context()
        threading.Thread(target=lambda: context.run(draw), name="jsg-batch-items", daemon=True).start()
        return await asyncio.wrap_future(drawn)


def read_items[T](items: Items, check: Callable[[int, Any], T]) -> list[T] | Iterator[T]:
    """Gives what `check` makes of each item and its index: of a list or tuple at once, else as it is drawn."""
    if isinstance(items, Mapping):
        raise ProgramError(
            "a batch is a list whose items are dicts of arguments or sequences of them, but of this dict, which has "
            f"the arguments of one run, item 0 is a {type(next(iter(items), '')).__name__}; write run_batch([{{...}}])"
        )
    if isinstance(items, list | tuple):
        return [check(index, item) for index, item in enumerate(items)]
    if not isinstance(items, Iterable):
        raise ProgramError(f"a batch is a list or another iterable of arguments, but got a {type(items).__name__}")
    return (check(index, item) for index, item in enumerate(items))


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch[State]:
    """Runs of a program, a bounded number at a time.

    Attributes:
        work: The runs.
        num_workers: The most runs under way at a time.
        progress_bar: Shows how many runs are done.
    """

    work: "Work[State]"
    num_workers: int
    progress_bar: bool

    def run(self) -> list[State]:
        """Gives all states, each at its end, in the order of the items."""
        return list(self._iterate(_UNBOUNDED))

    def iterate(self) -> Iterator[State]:
        """Gives each state as soon as its run and those before it are done. Closing the iterator cancels the rest."""
        return self._iterate(max(_GENERATOR_WINDOW, 2 * self.num_workers))

    async def run_async(self) -> list[State]:
        """Does the same as `run`, for tasks."""
        async with contextlib.aclosing(self._states(asyncio.Semaphore(_UNBOUNDED))) as states:
            return [state async for state in states]

    async def iterate_async(self) -> AsyncIterator[State]:
        """Does the same as `iterate`, for tasks."""
        room = asyncio.Semaphore(max(_GENERATOR_WINDOW, 2 * self.num_workers))
        async with contextlib.aclosing(self._states(room)) as states:
            async for state in states:
                yield state
                room.release()

    def _iterate(self, window: int) -> Iterator[State]:
        """Runs on an event loop in another thread, so that the caller can be interrupted and async bodies run."""
        arrived: queue.SimpleQueue[State | BaseException | None] = queue.SimpleQueue()
        driver: concurrent.futures.Future[_Driver] = concurrent.futures.Future()

        async def drive() -> None:
            room = asyncio.Semaphore(window)
            task = asyncio.current_task()
            assert task is not None
            driver.set_result(_Driver(asyncio.get_running_loop(), task, room))
            async with contextlib.aclosing(self._states(room)) as states:
                async for state in states:
                    arrived.put(state)

        def serve() -> None:
            try:
                asyncio.run(drive())
                arrived.put(None)
            except BaseException as error:  # the thread that waits raises it
                arrived.put(error)

        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(serve), name="jsg-batch", daemon=True)
        try:
            thread.start()
            handle = driver.result()
            while (state := arrived.get()) is not None:
                if isinstance(state, BaseException):
                    raise state
                yield state
                handle.post(handle.room.release)
        finally:
            if thread.is_alive():  # an interrupt may come before it is known what to cancel
                handle = driver.result()
                handle.post(handle.task.cancel)
                thread.join()

    async def _states(self, room: asyncio.Semaphore) -> AsyncGenerator[State]:
        loop = asyncio.get_running_loop()
        drawing = asyncio.Lock()
        started: asyncio.Queue[asyncio.Future[State] | None] = asyncio.Queue()
        num_working = self.num_workers
        with progress(self.work.size, self.progress_bar) as advance:

            async def work() -> None:
                while True:
                    await room.acquire()
                    async with drawing:  # so that the futures have the order of the items
                        done = loop.create_future()
                        try:
                            start = await self.work.draw()
                        except Exception as error:
                            _fail(done, error)
                            started.put_nowait(done)
                            return
                        if start is None:
                            room.release()
                            return
                        started.put_nowait(done)
                    try:
                        done.set_result(await start())
                    except Exception as error:  # our bug, or a backend that cannot open sessions
                        _fail(done, error)
                        return
                    advance()

            def end(_: asyncio.Task[None]) -> None:
                nonlocal num_working
                num_working -= 1
                if not num_working:
                    started.put_nowait(None)

            workers = [asyncio.create_task(work()) for _ in range(self.num_workers)]
            for worker in workers:
                worker.add_done_callback(end)
            try:
                while (done := await started.get()) is not None:
                    yield await done
            finally:
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)


@dataclasses.dataclass(frozen=True, slots=True)
class _Driver:
    loop: asyncio.AbstractEventLoop
    task: asyncio.Task[Any]
    room: asyncio.Semaphore

    def post(self, call: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and no task is left to hear of it
            self.loop.call_soon_threadsafe(call)


def arguments_of(item: Any, index: int) -> Arguments:
    """Gives the arguments of one run. Raises ProgramError where the item is neither a dict nor a sequence."""
    match item:
        case Mapping():
            return (), dict(item)
        case Sequence() if not isinstance(item, str | bytes):
            return tuple(item), {}
    raise ProgramError(
        f"an item of a batch is a dict of arguments or a sequence of them, but item {index} is a {type(item).__name__}"
    )


def texts_of(arguments: Arguments) -> frozenset[str]:
    """Gives the texts among the arguments of a run, in its lists and dicts too, but of many values only the first."""
    texts, waiting = set[str](), collections.deque[Any](arguments)
    for _ in range(_MOST_VALUES):
        match waiting.popleft() if waiting else None:
            case str() as text:
                texts.add(str.__str__(text))  # of a subclass too, which need not be hashable
            case dict() as values:  # and no other mapping, whose values may be made when they are asked for, or not be
                waiting.extend(itertools.islice(dict.values(values), _MOST_VALUES))
            case list() | tuple() as values:
                waiting.extend(values[:_MOST_VALUES])
    return frozenset(texts - {""})


def num_workers(num_threads: int | Literal["auto"], work: Work[Any]) -> int:
    """Gives how many runs are under way at a time. Raises ProgramError for a `num_threads` that is no such number."""
    num_items = work.size
    if num_threads == "auto":
        num_threads = work.auto
    if not isinstance(num_threads, int) or isinstance(num_threads, bool) or num_threads < 1:
        raise ProgramError(f"num_threads must be 'auto' or a number of at least 1, but got {num_threads!r}")
    return num_threads if num_items is None else max(1, min(num_threads, num_items))


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    done.set_exception(error)
    done.exception()  # otherwise a future that nobody reaches warns that its error was never read


async def _each[State](states: Sequence[State]) -> AsyncIterator[State]:
    for state in states:
        yield state


@contextlib.contextmanager
def progress(total: int | None, is_shown: bool) -> Iterator[Callable[[], None]]:
    """Gives a function to be called once for each run that is done; shows a bar if `is_shown`."""
    if not is_shown:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("programs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:  # a program's output is often sent to a file
        task = bar.add_task("programs", total=total)
        yield lambda: bar.advance(task)
