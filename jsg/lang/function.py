"""Programs: Python functions whose first parameter is the state `s`."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Unpack, overload

from jsg.errors import ProgramError
from jsg.lang import batch
from jsg.lang.backend import Backend, BackendSource
from jsg.lang.defaults import as_backend
from jsg.lang.ir import PUBLISHED, SamplingArgs
from jsg.lang.run import Run, calling_backend
from jsg.lang.run_args import RunArgs, take_run_args
from jsg.lang.state import ProgramState
from jsg.lang.streams.loop import shared_loop
from jsg.lang.tracing import scope


class SglFunction:
    """A program.

    Attributes:
        func: The function, `def` or `async def`; its first parameter is the state.
        num_api_spec_tokens: New tokens that one call of a remote API may ask for beyond the gen at hand.
        bound: Arguments given by `bind`.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        num_api_spec_tokens: int | None = None,
        bound: Mapping[str, Any] | None = None,
    ):
        names = list(inspect.signature(func).parameters)
        if not names or names[0] != "s":
            raise ProgramError(
                f"the first parameter of a program must be named s, but {func.__qualname__} has "
                f"{names[0] if names else 'none'}"
            )
        if num_api_spec_tokens is not None and (not isinstance(num_api_spec_tokens, int) or num_api_spec_tokens < 1):
            raise ProgramError(f"num_api_spec_tokens must be at least 1, but got {num_api_spec_tokens!r}")
        self.func = func
        self.num_api_spec_tokens = num_api_spec_tokens
        self.bound = dict(bound or {})
        self.is_async = inspect.iscoroutinefunction(func)
        self._own = frozenset(names[1:])
        self.__name__ = func.__name__
        self.__qualname__ = func.__qualname__
        self.__module__ = func.__module__
        self.__doc__ = func.__doc__

    def bind(self, **kwargs: Any) -> "SglFunction":
        """The program with these arguments given."""
        unknown = kwargs.keys() - self._own
        if unknown and not self._takes_any():
            raise ProgramError(f"{self.__qualname__} has no parameter {', '.join(sorted(unknown))}")
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bound, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `run`; an async program gives what `arun` gives, to be awaited; in a trace, it is traced."""
        return self.arun(*args, **kwargs) if self.is_async and not scope.active() else self.run(*args, **kwargs)

    def run(
        self, *args: Any, stream: bool = False, backend: Backend | BackendSource | None = None, **kwargs: Any
    ) -> Any:
        """Runs it; gives its state, whose variables may not be computed yet: reading them waits.

        Args:
            *args: Of the function, behind the state.
            stream: Returns at once and runs the body in a thread, so that text can be read as it comes.
            backend: Where; that of the program which calls this one, or the default backend, where None.
            **kwargs: Of the function, and what `RunArgs` says; a name that is both is the function's.

        Returns:
            A `ProgramState`; in a trace, what the tracer gives.

        Raises:
            ProgramError: It is async and an event loop runs: use `arun`. Arguments are wrong.
            Exception: Whatever the body raises (without `stream`).
        """
        given, kwargs = take_run_args(kwargs, self._own)
        if (tracing := scope.active()) is not None:
            return tracing.call(self, args, kwargs, _unless_empty(given))
        state, run = self._start(args, kwargs, given, backend)
        if stream:
            batch.in_thread(lambda: self._keep_body(state, run, args, kwargs))
        elif self.is_async:
            if asyncio._get_running_loop() is not None:
                raise ProgramError(f"{self.__qualname__} is async, and an event loop runs: use `await ....arun(...)`")
            asyncio.run(self._run_async_body(state, run, args, kwargs))
        else:
            self._run_body(state, run, args, kwargs)
        return state

    async def arun(
        self, *args: Any, stream: bool = False, backend: Backend | BackendSource | None = None, **kwargs: Any
    ) -> Any:
        """Runs it to its end; gives its state, all of whose variables are known then or have failed.

        An async body runs in the calling task, another one in a thread. Cancelling the task cancels the program.

        Args:
            *args: As in `run`.
            stream: Returns at once; the body runs beside the caller.
            backend: As in `run`.
            **kwargs: As in `run`.
        """
        given, kwargs = take_run_args(kwargs, self._own)
        if (tracing := scope.active()) is not None:
            return tracing.call(self, args, kwargs, _unless_empty(given))
        state, run = self._start(args, kwargs, given, backend)
        if stream and self.is_async:
            task = asyncio.create_task(self._keep_async_body(state, run, args, kwargs))
            run.ended.when_done(task.get_name)  # the loop keeps only a weak reference to a task
        elif stream:
            batch.in_thread(lambda: self._keep_body(state, run, args, kwargs))
        else:
            await self._run_to_end(state, run, args, kwargs)
            if run.body_error is not None:
                raise run.body_error
        return state

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[False] = False,
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[RunArgs],
    ) -> list[ProgramState]: ...

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: Literal[True],
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[RunArgs],
    ) -> Iterator[ProgramState]: ...

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[RunArgs],
    ) -> list[ProgramState] | Iterator[ProgramState]:
        """Runs it once for each item, several at a time; gives the states in the items' order, each at its end.

        What fails in an item stays with its state: `states[i].error()`. An interrupt cancels all.

        Args:
            batch_kwargs: For each run, its keyword arguments as a dict or its positional ones as a sequence.
            num_threads: Runs under way at a time; "auto" is 96, or 16 per core if that is more.
            progress_bar: Shows how many are done.
            generator_style: Gives an iterator, whose states come as soon as they and those before them are done.
            backend: As in `run`.
            **run_args: As `RunArgs` says, for all; a name that is the function's is given per item.

        Raises:
            ProgramError: An item does not fit the function's parameters; nothing was run. A keyword is an argument of
                the function.
        """
        if (tracing := scope.active()) is not None:
            traced = self._trace_batch(tracing, batch_kwargs, dict(run_args))
            return iter(traced) if generator_style else traced
        runs = self._batch(batch_kwargs, num_threads, progress_bar, backend, dict(run_args))
        return runs.iterate() if generator_style else runs.run()

    async def arun_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        backend: Backend | BackendSource | None = None,
        **run_args: Unpack[RunArgs],
    ) -> list[ProgramState] | AsyncIterator[ProgramState]:
        """As `run_batch`, for tasks; with `generator_style` an asynchronous iterator."""
        if (tracing := scope.active()) is not None:
            traced = self._trace_batch(tracing, batch_kwargs, dict(run_args))
            return _each(traced) if generator_style else traced
        runs = self._batch(batch_kwargs, num_threads, progress_bar, backend, dict(run_args))
        return runs.iterate_async() if generator_style else await runs.run_async()

    # What these three load costs more time than all else here, and a program that is only interpreted needs none of it.

    def trace(self, **constants: Any) -> Any:
        """The program as a `Graph`: its arguments symbolic but for `constants`. Raises TraceError."""
        from jsg.lang.tracing.tracer import trace

        return trace(self, constants)

    def compile(self, **constants: Any) -> Any:
        """The program as a `CompiledFunction`, which prints, draws, is sent to servers and runs. Raises TraceError."""
        from jsg.lang.executor.compiled import CompiledFunction

        return CompiledFunction(self.trace(**constants))

    def cache(self, backend: Backend | BackendSource | None = None) -> None:
        """Computes the constant text with which every run of the program begins, so that it is cached.

        Args:
            backend: As in `run`.

        Raises:
            TraceError: The program cannot be traced.
        """
        from jsg.lang.executor.compiled import cache_prefix

        cache_prefix(self.trace(), as_backend(backend))

    # Pieces of runs.

    def _start(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: SamplingArgs,
        backend: Backend | BackendSource | None,
    ) -> tuple[ProgramState, Run]:
        self.check_arguments(args, kwargs)
        chosen = (calling_backend() if backend is None else None) or as_backend(backend)
        run = Run(shared_loop(), chosen, given.over(PUBLISHED), self.num_api_spec_tokens)
        return ProgramState(run.stream, run), run

    def check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any], which: str = "") -> None:
        """Raises ProgramError where they do not fit the function's parameters."""
        try:
            inspect.signature(self.func).bind(None, *args, **{**self.bound, **kwargs})
        except TypeError as error:
            raise ProgramError(f"{self.__qualname__}{which}: {error}") from None

    def _run_body(self, state: ProgramState, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        with run.body():
            state.ret_value = self.func(state, *args, **{**self.bound, **kwargs})

    async def _run_async_body(
        self, state: ProgramState, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        with run.body(asyncio.get_running_loop()):
            state.ret_value = await self.func(state, *args, **{**self.bound, **kwargs})

    def _keep_body(self, state: ProgramState, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            if self.is_async:
                asyncio.run(self._run_async_body(state, run, args, kwargs))
            else:
                self._run_body(state, run, args, kwargs)
        except Exception:
            assert run.body_error is not None  # who reads the state gets it

    async def _keep_async_body(
        self, state: ProgramState, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        try:
            await self._run_async_body(state, run, args, kwargs)
        except Exception:
            assert run.body_error is not None

    async def _run_to_end(self, state: ProgramState, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Runs the body and what it started; what the body raises is kept in the run."""
        try:
            if self.is_async:
                await self._keep_async_body(state, run, args, kwargs)
            else:
                batch.in_thread(lambda: self._keep_body(state, run, args, kwargs))
                await run.ended.get()
            await run.settle()
        except asyncio.CancelledError:
            run.cancel()
            raise

    def _batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        num_threads: int | Literal["auto"],
        progress_bar: bool,
        backend: Backend | BackendSource | None,
        run_args: dict[str, Any],
    ) -> batch.Batch[ProgramState]:
        items, given = self._items(batch_kwargs, run_args)
        chosen = (calling_backend() if backend is None else None) or as_backend(backend)

        async def run_one(index: int) -> ProgramState:
            args, kwargs = items[index]
            state, run = self._start(args, kwargs, given, chosen)
            await self._run_to_end(state, run, args, kwargs)
            return state

        return batch.Batch(len(items), run_one, batch.num_workers(num_threads, len(items)), progress_bar)

    def _items(
        self, batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]], run_args: dict[str, Any]
    ) -> tuple[list[batch.Arguments], SamplingArgs]:
        given, rest = take_run_args(run_args, self._own)
        if rest:
            raise ProgramError(f"run_batch has no argument {', '.join(sorted(rest))}; arguments are given per item")
        items = [batch.arguments_of(item, index) for index, item in enumerate(batch_kwargs)]
        for index, (args, kwargs) in enumerate(items):
            self.check_arguments(args, kwargs, f", item {index} of the batch")
        return items, given

    def _trace_batch(
        self,
        tracing: scope.Tracing,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        run_args: dict[str, Any],
    ) -> list[Any]:
        items, given = self._items(batch_kwargs, run_args)
        return [tracing.call(self, args, kwargs, _unless_empty(given)) for args, kwargs in items]

    def _takes_any(self) -> bool:
        parameters = inspect.signature(self.func).parameters.values()
        return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> SglFunction: ...


@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...


def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> SglFunction | Callable[[Callable[..., Any]], SglFunction]:
    """Makes a function a program; a decorator, with or without parentheses.

    Args:
        func: Its first parameter is the state, `s`.
        num_api_spec_tokens: New tokens that one call of a remote API may ask for beyond the gen at hand, to answer
            later gens with: API speculative execution.

    Raises:
        ProgramError: The function's first parameter has another name.
    """
    if func is not None:
        return SglFunction(func, num_api_spec_tokens)
    return lambda decorated: SglFunction(decorated, num_api_spec_tokens)


def _unless_empty(given: SamplingArgs) -> SamplingArgs | None:
    return None if given == SamplingArgs() else given


async def _each(states: Sequence[Any]) -> AsyncIterator[Any]:
    for state in states:
        yield state
