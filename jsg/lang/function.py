"""Programs: Python functions whose first parameter is the state `s`."""

import asyncio
import collections
import contextvars
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final, overload

from jsg.errors import ProgramError
from jsg.lang.program import batch
from jsg.lang.program.awaited import awaited
from jsg.lang.program.defaults import as_backend
from jsg.lang.program.run import Run, calling_run
from jsg.lang.program.run_args import RunArgs, take_run_args
from jsg.lang.program.state import ProgramState
from jsg.lang.streams.loop import shared_loop
from jsg.lang.tracing import scope
from jsg.lang.words.backend import Backend, BackendSource
from jsg.lang.words.ir import PUBLISHED, SamplingArgs
from jsg.lang.words.keywords import advice, unknown_in_batch


@final
class SglFunction[**P](batch.Batchable[ProgramState]):
    """A program.

    Attributes:
        func: The function, `def` or `async def`; its first parameter is the state.
        num_api_spec_tokens: New tokens that one call of a remote API may ask for beyond its gen.
        bound: The arguments that `bind` was given.
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

    def __repr__(self) -> str:
        return f"<program {self.__qualname__}{inspect.signature(self.func)}>"

    def bind(self, **kwargs: Any) -> "SglFunction":
        """Gives the program with these arguments bound."""
        unknown = kwargs.keys() - self._own
        if unknown and not self._takes_any():
            raise ProgramError(f"{self.__qualname__} has no parameter {', '.join(sorted(unknown))}")
        return SglFunction(self.func, self.num_api_spec_tokens, {**self.bound, **kwargs})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does the same as `run`. Outside of programs an async one gives what `arun` gives, to be awaited."""
        is_awaited = self.is_async and scope.active() is None and calling_run() is None
        return self.arun(*args, **kwargs) if is_awaited else self.run(*args, **kwargs)

    def run(
        self, *args: Any, stream: bool = False, backend: Backend | BackendSource | None = None, **kwargs: Any
    ) -> Any:
        """Runs the program; gives its state. Variables may not be computed yet: reading them waits.

        Inside of a program it starts the called one beside the caller, and returns at once. An async caller may await
        the state, which is then at its end.

        Args:
            *args: The arguments of the function after the state.
            stream: Runs the body in a thread and returns at once, so that text can be read as it comes.
            backend: The backend. None takes that of the program which calls this one, or the default one.
            **kwargs: Arguments of the function and of `RunArgs`; a name of both is the function's.

        Returns:
            A `ProgramState`; in a trace a `TracedState`.

        Raises:
            ProgramError: The arguments are wrong, or the program is async and an event loop runs, which needs `arun`.
            Exception: The body raised it (without `stream`, outside of programs).
        """
        given, kwargs = take_run_args(kwargs, self._own)
        if (tracing := scope.active()) is not None:
            return tracing.call(self, args, kwargs, _unless_empty(given))
        caller = calling_run()
        call = self._start(args, kwargs, given, backend)
        if caller is not None and self.is_async and caller.is_async_body_here():
            call.as_task()
        elif stream or caller is not None:
            call.in_thread()
        else:
            if self.is_async and asyncio._get_running_loop() is not None:
                raise ProgramError(f"{self.__qualname__} is async, and an event loop runs: use `await ....arun(...)`")
            call.run_to_caller()
        return call.state

    @awaited
    async def arun(
        self, *args: Any, stream: bool = False, backend: Backend | BackendSource | None = None, **kwargs: Any
    ) -> Any:
        """Runs the program to its end; gives its state, whose variables are all known or failed.

        An async body runs in the calling task, a plain one in a thread. Cancelling the task cancels the program.

        Args:
            *args: As in `run`.
            stream: Returns at once, while the body runs.
            backend: As in `run`.
            **kwargs: As in `run`.
        """
        given, kwargs = take_run_args(kwargs, self._own)
        if (tracing := scope.active()) is not None:
            return tracing.call(self, args, kwargs, _unless_empty(given))
        call = self._start(args, kwargs, given, backend)
        if stream and self.is_async:
            call.as_task()
        elif stream:
            call.in_thread()
        else:
            await call.run_to_end()
            if call.run.body_error is not None:
                call.run.history.read(call.run.body_error)
                raise call.run.body_error
        return call.state

    # These three import much, which a program that is only interpreted does not need.

    def trace(self, **constants: Any) -> Any:
        """Gives the program as a `Graph`. Its arguments are symbols, apart from `constants`. Raises TraceError."""
        from jsg.lang.tracing.tracer import trace

        return trace(self, constants)

    def compile(self, **constants: Any) -> Any:
        """Gives the program as a `CompiledFunction`, which prints, draws and runs. Raises TraceError."""
        from jsg.lang.executor.compiled import CompiledFunction

        return CompiledFunction(self.trace(**constants))

    def cache(self, backend: Backend | BackendSource | None = None) -> None:
        """Computes the constant text with which all runs of the program begin, so that it is cached.

        Args:
            backend: As in `run`.

        Raises:
            TraceError: The program reads a value before it appends anything.
        """
        from jsg.lang.executor.compiled import cache_prefix
        from jsg.lang.tracing.tracer import opening

        cache_prefix(opening(self), as_backend(backend))

    # Pieces of runs.

    def _start(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        given: SamplingArgs,
        backend: Backend | BackendSource | None,
        shared: frozenset[str] | None = None,
    ) -> "_Call":
        self.check_arguments(args, kwargs)
        if shared is None and (caller := calling_run()) is not None:
            shared = caller.shared_texts
        own = frozenset() if shared is None else batch.texts_of((tuple(args), dict(kwargs))) - shared
        run = Run(shared_loop(), _chosen(backend), given.over(PUBLISHED), self.num_api_spec_tokens, own, shared)
        own = ProgramState(run.stream, run)  # whose reads wait for what the body has appended, and not for its end
        state = ProgramState(run.stream, run, is_callers=True)
        return _Call(state, run, lambda: self.func(own, *args, **{**self.bound, **kwargs}), self.is_async)

    def check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any], which: str = "") -> None:
        """Raises ProgramError where the arguments do not fit the parameters of the function."""
        try:
            inspect.signature(self.func).bind(None, *args, **{**self.bound, **kwargs})
        except TypeError as error:
            unknown = kwargs.keys() - self._own
            raise ProgramError(f"{self.__qualname__}{which}: {error}{advice(unknown, 'run')}") from None

    def _batch(
        self, items: batch.Items, backend: Backend | BackendSource | None, options: dict[str, Any]
    ) -> batch.Work[ProgramState] | list[Any]:
        given, rest = take_run_args(options, self._own)
        if "where" in rest:
            raise ProgramError("only a compiled program takes where; leave it out, or compile the program")
        if rest:
            raise ProgramError(unknown_in_batch(rest, RunArgs.__annotations__))

        def checked(index: int, item: Any) -> batch.Arguments:
            args, kwargs = batch.arguments_of(item, index)
            self.check_arguments(args, kwargs, f", item {index} of the batch")
            return args, kwargs

        runs = batch.read_items(items, checked)
        if (tracing := scope.active()) is not None:
            return [tracing.call(self, args, kwargs, _unless_empty(given)) for args, kwargs in runs]
        chosen = _chosen(backend)
        known = runs if isinstance(runs, list) else []
        counts = collections.Counter(text for arguments in known for text in batch.texts_of(arguments))
        shared = frozenset(text for text, count in counts.items() if count > 1 or len(known) == 1)

        async def run_one(arguments: batch.Arguments) -> ProgramState:
            call = self._start(*arguments, given, chosen, shared)
            await call.run_to_end()
            return call.state

        starts = (functools.partial(run_one, arguments) for arguments in runs)
        return batch.Work(starts, len(runs) if isinstance(runs, list) else None)

    def _takes_any(self) -> bool:
        parameters = inspect.signature(self.func).parameters.values()
        return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """One run of a program.

    Attributes:
        state: The state for whoever runs the program.
        run: The run.
        body: Calls the function.
        is_async: The function is `async def`.
    """

    state: ProgramState
    run: Run
    body: Callable[[], Any]
    is_async: bool

    def in_thread(self) -> None:
        """Runs the body in a thread of its own, or in this one where the system gives no more threads."""
        try:
            in_thread(self.keep_body)
        except RuntimeError:  # thousands of programs run; a late start is better than none
            self.keep_body()

    def as_task(self) -> None:
        """Runs an async body as a task of the loop that runs."""
        task = asyncio.create_task(self.keep_async_body())
        self.run.ended.when_done(task.get_name)  # the loop keeps only a weak reference to a task

    def run_to_caller(self) -> None:
        """Runs the body in this thread, and raises what it raises."""
        try:
            self.run_body()
        except BaseException as error:
            self.run.history.read(error)
            raise

    def run_body(self) -> None:
        """Runs the body in this thread."""
        if self.is_async:
            asyncio.run(self._run_async_body(is_last=True))
            return
        with self.run.body():
            self.run.returned.finish(self.body())

    def keep_body(self) -> None:
        """As `run_body`; what the body raises stays in the run, where whoever reads the state finds it."""
        try:
            self.run_body()
        except Exception:
            assert self.run.body_error is not None

    async def keep_async_body(self) -> None:
        """As `keep_body`, for an `async def` on the loop that runs."""
        try:
            await self._run_async_body()
        except Exception:
            assert self.run.body_error is not None

    async def run_to_end(self) -> None:
        """Runs the body and waits for what it started; what the body raises stays in the run."""
        try:
            if self.is_async:
                await self.keep_async_body()
            else:
                in_thread(self.keep_body)
                await self.run.ended.get()
            await self.run.settle()
        except asyncio.CancelledError:
            self.run.cancel()
            raise

    async def _run_async_body(self, *, is_last: bool = False) -> None:
        """Runs the body. With `is_last` the loop ends then, so it waits for the programs that run on the loop too."""
        with self.run.body(asyncio.get_running_loop()):
            self.run.returned.finish(await self.body())
        if is_last:
            await self.run.called_ended()


def in_thread(body: Callable[[], object]) -> None:
    """Runs `body` in a thread of its own with the caller's context. The thread keeps no interpreter from ending."""
    context = contextvars.copy_context()
    threading.Thread(target=lambda: context.run(body), name="jsg-program", daemon=True).start()


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
        func: The function, whose first parameter is the state, `s`.
        num_api_spec_tokens: API speculative execution: new tokens that one call of a remote API may ask for beyond its
            gen, to answer later gens with.

    Raises:
        ProgramError: The function's first parameter has another name.
    """
    if func is not None:
        return SglFunction(func, num_api_spec_tokens)
    return lambda decorated: SglFunction(decorated, num_api_spec_tokens)


def _chosen(backend: Backend | BackendSource | None) -> Backend:
    """The backend that was given, that of the program that calls, or the default one."""
    caller = calling_run() if backend is None else None
    return as_backend(backend) if caller is None else caller.backend


def _unless_empty(given: SamplingArgs) -> SamplingArgs | None:
    return None if given == SamplingArgs() else given
