"""Reading a state: of a program that is interpreted, that is traced, or that ran as a graph.

Each read has a form for threads, which blocks, and one for tasks, which is awaited. Both raise the error that kept the
value from being known.
"""

import abc
import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from jsg.errors import ProgramError, UnknownVariableError
from jsg.lang.program import showing
from jsg.lang.program.awaited import awaited
from jsg.lang.program.messages import messages_of
from jsg.lang.streams.history import History
from jsg.lang.streams.variables import Variable

What = Literal["nothing", "text", "turns"]

_ADVICE = (
    "write `await s.aget(name)`, `await s.atext()`, `await s.settle()`, `async for ... in s.text_async_iter()`; or "
    "`state = await program.arun(...)`, whose variables are all known"
)


class Readable(abc.ABC):
    """A state whose variables and text can be read. Every state is one."""

    __slots__ = ()

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """Gives the value of a variable.

        Raises:
            UnknownVariableError: The program does not set it.
            JsgError: The error that kept the value from being known.
        """
        return self._wait(self._find(name))

    def text(self) -> str:
        """Gives all text with the answers of the model: inside the program so far, for its caller that at the end."""
        return self._wait(self._read("text"))

    def sync(self) -> None:
        """Waits until everything appended so far is done, or, in the caller of the program, until the run has ended.

        Raises:
            Exception: It ended this state early.
        """
        self._wait(self._read("nothing"))

    @awaited
    async def aget(self, name: str) -> Any:
        """Gives the same as `get_var`, for tasks."""
        return await self._get(await self._find_async(name))

    @awaited
    async def atext(self) -> str:
        """Gives the same as `text`, for tasks."""
        return await self._get(self._read("text"))

    async def settle(self) -> None:
        """Does the same as `sync`, for tasks."""
        await self._get(self._read("nothing"))

    def _find(self, name: str, timeout: float | None = None) -> Variable:
        if (variable := self._known(name)) is not None:
            return variable
        with self._expected(name) as expected:
            return self._wait(expected, timeout)

    async def _find_async(self, name: str) -> Variable:
        if (variable := self._known(name)) is not None:
            return variable
        with self._expected(name) as expected:
            return await self._get(expected)

    @abc.abstractmethod
    def _known(self, name: str) -> Variable | None:
        """Gives the variable of a name, or None where it is not set yet."""

    @abc.abstractmethod
    def _expected(self, name: str) -> AbstractContextManager[Variable]:
        """Gives a variable that will hold the variable of a name. Raises where nothing will set the name."""

    @abc.abstractmethod
    def _read(self, what: What) -> Variable:
        """Gives a variable that is done when everything is done that `text` and `sync` wait for."""

    @abc.abstractmethod
    def _wait(self, variable: Variable, timeout: float | None = None) -> Any:
        """Gives the value of a variable; blocks the thread. Raises TimeoutError."""

    @abc.abstractmethod
    async def _get(self, variable: Variable) -> Any:
        """Gives the value of a variable, for tasks."""


class RunState(Readable):
    """A state of a program that runs, or ran."""

    __slots__ = ()

    @abc.abstractmethod
    def cancel(self) -> None:
        """Aborts what is under way."""

    def messages(self) -> list[dict[str, Any]]:
        """Gives the turns, as `text` gives the text: `role` and `content`, a text or, with pictures, a list of parts.

        With `separate_reasoning` a turn has its reasoning as `reasoning_content`.
        """
        return messages_of(self._wait(self._read("turns")))

    def error(self) -> BaseException | None:
        """Waits as `sync` does; gives the error that ended this state or the program early, or None."""
        self._wait_done(self._read("nothing"))
        return self._told(self._failure())

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any]:
        """Gives the report of the backend about the call that set a variable.

        The report of a variable of joined branches is `{"branches": [...]}`: the report of each branch, or None.

        Raises:
            TimeoutError: The report was not known within `timeout` seconds.
            UnknownVariableError: No call set it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            variable = self._find(name, timeout)
            for awaited in (variable, self._reported(variable)):
                self._wait(awaited, None if deadline is None else max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            if deadline is None or time.monotonic() < deadline:
                raise  # it is the error of the program
            raise TimeoutError(f"the report about {name!r} was not known within {timeout} s") from None
        return _meta(name, variable)

    def keys(self) -> list[str]:
        """Gives the names of the variables that are set so far, so that `dict(state)` works. Does not wait."""
        return list(self._variables())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def usage(self) -> dict[str, int]:
        """Gives `calls`, `prompt_tokens`, `cached_tokens` and `completion_tokens` (generated) of all calls of the run.

        The calls of branches and of called programs count. Gens that one call of a remote API answered count as this
        one call. Waits for the end of the run; inside the program, for what was appended.
        """
        self._wait_done(self._everything())
        return self._usage()

    def timeline(self) -> list[dict[str, Any]]:
        """Gives these calls in the order in which they began, each as a dict; waits as `usage` does.

        `name` and `kind` ("gen" or "select"), `line` (file and line of the statement), `node` (its number where a graph
        runs), `start_s` and `end_s` in seconds since the run began, the tokens as in `usage` (None if not reported),
        and `error`, the class of what kept the call from its end.
        """
        self._wait_done(self._everything())
        return self._timeline()

    async def ausage(self) -> dict[str, int]:
        """Gives the same as `usage`, for tasks."""
        await self._everything().done()
        return self._usage()

    async def atimeline(self) -> list[dict[str, Any]]:
        """Gives the same as `timeline`, for tasks."""
        await self._everything().done()
        return self._timeline()

    def __repr__(self) -> str:
        return showing.one_line(self._shown())

    def _repr_html_(self) -> str:
        """Gives the state for notebooks: what there is now, without a wait."""
        return showing.html_of(self._shown())

    def _shown(self) -> showing.Shown:
        """Gives what there is now."""
        log, failure = self._text_log(), self._failure()
        return showing.Shown(
            kind=type(self).__name__,
            status="failed" if failure is not None else "done" if log.is_done else "running",
            failure=failure,
            text="".join(log.pieces()),
            variables=dict(self._variables()),
            usage=self._usage(),
        )

    def _usage(self) -> dict[str, int]:
        return self._history().usage()

    def _timeline(self) -> list[dict[str, Any]]:
        return self._history().timeline()

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Gives the text of a variable, or all text, as it comes. Inside the program all text ends here.

        Raises:
            JsgError: The error that kept the rest from coming.
        """
        variable, end = (self._find(var_name), None) if var_name is not None else self._log()
        if not (end or variable).is_done:
            self._check_may_block()
        try:
            yield from variable.follow(end)
        except KeyboardInterrupt:
            self._interrupt()
            raise
        except Exception as error:
            self._told(error)
            raise
        if var_name is not None:
            _check_text(var_name, variable)

    async def amessages(self) -> list[dict[str, Any]]:
        """Gives the same as `messages`, for tasks."""
        return messages_of(await self._get(self._read("turns")))

    async def aerror(self) -> BaseException | None:
        """Gives the same as `error`, for tasks."""
        await self._read("nothing").done()
        return self._told(self._failure())

    async def aget_meta_info(self, name: str) -> dict[str, Any]:
        """Gives the same as `get_meta_info`, for tasks."""
        variable = await self._find_async(name)
        await self._get(variable)
        await self._get(self._reported(variable))
        return _meta(name, variable)

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """Gives the same as `text_iter`, for tasks.

        Leaving the loop ends no call, because others may read on. If nobody does, call `cancel`.

        Args:
            var_name: The variable; None gives all text.
            return_meta_data: Gives pairs of text and the report of `get_meta_info`, which is empty up to the last pair.
        """
        if var_name is None and return_meta_data:
            raise ProgramError("return_meta_data needs the name of a variable")
        variable, end = (await self._find_async(var_name), None) if var_name is not None else self._log()
        try:
            async for piece in variable.follow_async(end):
                yield (piece, {}) if return_meta_data else piece
        except Exception as error:
            self._told(error)
            raise
        if var_name is not None:
            _check_text(var_name, variable)
        if return_meta_data:
            await self._get(self._reported(variable))
            yield "", variable.meta or {}

    def _wait(self, variable: Variable, timeout: float | None = None) -> Any:
        self._wait_done(variable, timeout)
        self._told(variable.error)
        return variable.now()

    async def _get(self, variable: Variable) -> Any:
        await variable.done()
        self._told(variable.error)
        return variable.now()

    def _wait_done(self, variable: Variable, timeout: float | None = None) -> None:
        if not variable.is_done:
            self._check_may_block()
        try:
            variable.wait_done(timeout)
        except KeyboardInterrupt:
            self._interrupt()
            raise

    def _told(self, error: BaseException | None) -> BaseException | None:
        """Notes that the reader learns of an error, and gives it."""
        if error is not None:
            self._history().read(error)
        return error

    @abc.abstractmethod
    def _history(self) -> History:
        """Gives the history of the run."""

    @abc.abstractmethod
    def _everything(self) -> Variable:
        """Gives a variable that is done when everything that `usage` counts is done."""

    @abc.abstractmethod
    def _variables(self) -> Mapping[str, Variable]:
        """Gives the variables that are set so far, by name."""

    @abc.abstractmethod
    def _text_log(self) -> Variable:
        """Gives all text as it grows."""

    @abc.abstractmethod
    def _check_may_block(self) -> None:
        """Raises ProgramError where a wait would block the event loop that does what is waited for."""

    @abc.abstractmethod
    def _interrupt(self) -> None:
        """Aborts the whole run, because a reader of it was interrupted."""

    @abc.abstractmethod
    def _log(self) -> tuple[Variable, Variable | None]:
        """Gives all text as it grows, and the variable of the number of pieces to be read; None reads all."""

    @abc.abstractmethod
    def _failure(self) -> BaseException | None:
        """Gives the error that has ended the state early, or None."""

    def _reported(self, variable: Variable) -> Variable:
        """Gives a variable that is done when the report about a done variable is complete."""
        return variable

    def _known(self, name: str) -> Variable | None:
        return self._variables().get(name)

    def __contains__(self, name: object) -> bool:
        return name in self._variables()


def check_may_block(programs: asyncio.AbstractEventLoop, *, is_async_body: bool = False, advice: str = _ADVICE) -> None:
    """Raises ProgramError where a wait would block an event loop. In the cell of a notebook it may.

    Args:
        programs: The loop on which programs run, which nobody may block.
        is_async_body: Whether an async body of a program runs on the loop of this thread.
        advice: What to write instead.
    """
    running = asyncio._get_running_loop()
    if running is None or (is_in_notebook() and running is not programs and not is_async_body):
        return
    raise ProgramError(f"waiting would stop the event loop that runs here: {advice}")


def is_in_notebook() -> bool:
    """Says whether IPython runs the code: it runs cells inside of an event loop, and a wait holds up only the cell."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    return get_ipython is not None and get_ipython() is not None


def _check_text(name: str, variable: Variable) -> None:
    """Raises ProgramError for a variable whose value is no text."""
    if not variable.num_pieces and not isinstance(variable.now(), str):
        raise ProgramError(f"only text can be iterated, but {name!r} is a {type(variable.now()).__name__}")


def _meta(name: str, variable: Variable) -> dict[str, Any]:
    if variable.meta is None:
        raise UnknownVariableError(f"{name!r} was not set by a call of the model, so nothing is reported about it")
    return variable.meta
