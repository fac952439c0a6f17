"""The state of a program: what its body extends, reads and forks."""

import contextlib
import itertools
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, assert_never, cast

from jsg.errors import ProgramError, UnknownVariableError
from jsg.lang.ir import Expr, Image, Role, RoleBegin, RoleEnd, Text, VarScopeBegin, VarScopeEnd, Video
from jsg.lang.nesting import JoinMode
from jsg.lang.places import program_place
from jsg.lang.run import Run
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.transcript import Said, Turn
from jsg.lang.streams.variables import Variable
from jsg.processing.media.base64_files import write_data_url


class ProgramState:
    """A prompt and its variables.

    Appending returns at once; reading waits for what is read, and raises the error that kept it from being known. What
    is read by `[...]`, `text`, ... blocks the thread; async programs read by `aget`, `atext`, ....

    Attributes:
        ret_value: What the program returned.
    """

    def __init__(self, stream: Stream, run: Run):
        self.ret_value: Any = None
        self._stream = stream
        self._run = run
        if stream is not run.stream:
            # A fork that nobody has any more needs its prefix no longer. The program's own stream ends with its body.
            weakref.finalize(self, stream.release).atexit = False

    # Appending.

    def __iadd__(self, value: "Expr | str") -> Self:
        self._stream.append(value, program_place())
        return self

    def extend(self, value: "Expr | str") -> Self:
        """Appends text or an expression, as `+=` does."""
        self._stream.append(value, program_place())
        return self

    def system(self, value: "Expr | str | None" = None) -> "_Turn | None":
        """Appends a turn of the system; without a value, `with s.system():` opens one."""
        return self._turn("system", value)

    def user(self, value: "Expr | str | None" = None) -> "_Turn | None":
        """Appends a turn of the user; without a value, `with s.user():` opens one."""
        return self._turn("user", value)

    def assistant(self, value: "Expr | str | None" = None) -> "_Turn | None":
        """Appends a turn of the assistant; without a value, `with s.assistant():` opens one."""
        return self._turn("assistant", value)

    def _turn(self, role: Role, value: "Expr | str | None") -> "_Turn | None":
        if value is None:
            return _Turn(self._stream, role)
        self._stream.append(RoleBegin(role) + value + RoleEnd(role), program_place())
        return None

    @contextlib.contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Has the text that is appended inside become the variable `name`."""
        self._stream.append(VarScopeBegin(name), program_place())
        yield
        self._stream.append(VarScopeEnd(name), program_place())

    def set_var(self, name: str, value: Any) -> None:
        """Sets a variable to a value; the prompt does not change."""
        self._stream.set(name, value)

    def __setitem__(self, name: str, value: Any) -> None:
        self._stream.set(name, value)

    # Forks.

    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> "ProgramStateGroup":
        """States that begin as this one is now and go their own way, side by side. Waits for nothing.

        Args:
            size: How many.
            position_ids_offset: For each, by how much the positions of what it appends are shifted.
        """
        children = self._stream.fork(size, position_ids_offset, program_place())
        return ProgramStateGroup([ProgramState(child, self._run) for child in children], self)

    @contextlib.contextmanager
    def copy(self, position_ids_offset: Sequence[int] | None = None) -> "Iterator[ProgramState]":
        """One fork, joined when the block ends."""
        branches = self.fork(1, position_ids_offset)
        yield branches[0]
        branches.join()

    # Reading, in threads.

    def __getitem__(self, name: str) -> Any:
        return self.get_var(name)

    def get_var(self, name: str) -> Any:
        """The value of a variable.

        Raises:
            UnknownVariableError: The program does not set it.
            JsgError: What kept it from being known.
        """
        return self._run.wait(self._find(name))

    def __contains__(self, name: object) -> bool:
        return name in self._stream.variables

    def text(self) -> str:
        """All text that was appended so far, what the model wrote included."""
        return self._run.wait(self._stream.read("text"))

    def messages(self) -> list[dict[str, Any]]:
        """The turns so far: `role`, and `content`: text, or a list of parts in order where there are pictures, videos.

        With `separate_reasoning` the reasoning of a turn is its `reasoning_content`.
        """
        return messages_of(self._run.wait(self._stream.read("turns")))

    def sync(self) -> None:
        """Waits until all that was appended so far is done. Raises nothing of what failed: see `error`."""
        self._run.check_may_block()
        with contextlib.suppress(Exception):
            self._run.wait(self._stream.read("nothing"))

    def error(self) -> BaseException | None:
        """Waits as `sync`; gives what ended this state or the program early, or None."""
        self.sync()
        return self._stream.runner.failure or self._run.body_error

    def get_meta_info(self, name: str, timeout: float | None = None) -> dict[str, Any]:
        """What the backend reported of the call that set a variable.

        Raises:
            TimeoutError: It was not known within `timeout` seconds.
            UnknownVariableError: No call set it.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        variable = self._find(name, timeout)
        self._run.wait(variable, None if deadline is None else max(0.0, deadline - time.monotonic()))
        return _meta(name, variable)

    def text_iter(self, var_name: str | None = None) -> Iterator[str]:
        """Text as it comes, of a variable or of everything; ends with that. Inside the program: up to here.

        Raises:
            JsgError: What kept the rest from coming.
        """
        self._run.check_may_block()
        try:
            if var_name is not None:
                variable = self._find(var_name)
                yield from variable.follow()
                _check_text(var_name, variable)
            else:
                yield from self._stream.log.follow(self._up_to_here())
        except KeyboardInterrupt:
            self._run.cancel()
            raise

    # Reading, in tasks.

    async def aget(self, name: str) -> Any:
        """As `get_var`, for async programs."""
        return await (await self._find_async(name)).get()

    async def atext(self) -> str:
        """As `text`, for async programs."""
        return await self._stream.read("text").get()

    async def amessages(self) -> list[dict[str, Any]]:
        """As `messages`, for async programs."""
        return messages_of(await self._stream.read("turns").get())

    async def settle(self) -> None:
        """As `sync`, for async programs."""
        with contextlib.suppress(Exception):
            await self._stream.read("nothing").get()

    async def aerror(self) -> BaseException | None:
        """As `error`, for async programs."""
        await self.settle()
        return self._stream.runner.failure or self._run.body_error

    async def aget_meta_info(self, name: str) -> dict[str, Any]:
        """As `get_meta_info`, for async programs."""
        variable = await self._find_async(name)
        await variable.get()
        return _meta(name, variable)

    async def text_async_iter(self, var_name: str | None = None, return_meta_data: bool = False) -> AsyncIterator[Any]:
        """As `text_iter`, for tasks of any event loop.

        Args:
            var_name: Which variable; everything where None.
            return_meta_data: Gives pairs of text and what `get_meta_info` gives: empty until the last pair.
        """
        if var_name is None:
            if return_meta_data:
                raise ProgramError("return_meta_data needs the name of a variable")
            async for piece in self._stream.log.follow_async(self._up_to_here()):
                yield piece
            return
        variable = await self._find_async(var_name)
        async for piece in variable.follow_async():
            yield (piece, {}) if return_meta_data else piece
        _check_text(var_name, variable)
        if return_meta_data:
            yield "", variable.meta or {}

    def cancel(self) -> None:
        """Aborts what this state and its forks, or the whole program if it is the program's, have under way."""
        if self._stream is self._run.stream:
            self._run.cancel()
        else:
            self._stream.cancel()

    def _up_to_here(self) -> Variable | None:
        return self._stream.read("size") if self._run.is_in_body() else None

    def _find(self, name: str, timeout: float | None = None) -> Variable:
        variable = self._stream.variables.get(name)
        if variable is not None:
            return variable
        expected = self._expect(name)
        try:
            return self._run.wait(expected, timeout)
        finally:
            self._stream.forget(expected)

    async def _find_async(self, name: str) -> Variable:
        variable = self._stream.variables.get(name)
        if variable is not None:
            return variable
        expected = self._expect(name)
        try:
            return await expected.get()
        finally:
            self._stream.forget(expected)

    def _expect(self, name: str) -> Variable:
        if self._run.is_in_body():  # nobody else could set it while the body waits
            expected = Variable()
            expected.finish(self._stream.variable(name))
            return expected
        return self._stream.expect(name, self._run.body_error)


class ProgramStateGroup:
    """The branches of a fork."""

    def __init__(self, states: list[ProgramState], parent: ProgramState):
        self.states = states
        self._parent = parent

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> ProgramState:
        return self.states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        if self.states[index] is not state:  # what `forks[i] += ...` assigns is the branch itself
            raise ProgramError("a branch cannot be replaced by another state; extend it with +=")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self.states)

    def __iadd__(self, value: "Expr | str | Sequence[Expr | str] | Callable[[int], Expr | str]") -> Self:
        place = program_place()
        if callable(value):
            values: Sequence[Expr | str] = [value(i) for i in range(len(self.states))]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            values = value
            if len(values) != len(self.states):
                raise ProgramError(
                    f"branches are extended by one value each: {len(self.states)}, but got {len(values)}"
                )
        else:
            values = [value] * len(self.states)
        for state, each in zip(self.states, values, strict=True):
            state._stream.append(each, place)
        return self

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Takes what the branches have into the state that they were forked from. Waits for nothing; the branches end.

        Args:
            mode: "gather_variable": each name that a branch set becomes, in the parent, the list of the branches'
                values, None where a branch did not set it. "concate_and_append": what each branch appended is
                appended to the parent, side by side: no branch sees another, what follows sees all.

        Raises:
            ProgramError: The branches were joined already. With "concate_and_append": the parent was extended since,
                or a branch opened or closed a turn.
        """
        self._parent._stream.join([state._stream for state in self.states], mode, program_place())


class _Turn:
    """`with s.user():` and its like, also `async with`."""

    def __init__(self, stream: Stream, role: Role):
        self._stream = stream
        self._role: Role = role

    def __enter__(self) -> None:
        self._stream.append(RoleBegin(self._role), program_place())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._stream.append(RoleEnd(self._role), program_place())

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


def messages_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Turns as messages of a chat API."""
    return [_message(turn) for turn in turns]


def _message(turn: Turn) -> dict[str, Any]:
    items: list[str | dict[str, Any]] = []
    reasoning = ""
    for item in turn.content:
        match item:
            case Text(text):
                items.append(text)
            case Said(text, thought):
                reasoning += thought
                items.append(text)
            case Image(data, media_type):
                items.append({"type": "image_url", "image_url": {"url": write_data_url(data, media_type)}})
            case Video(data, num_frames, media_type):
                shown = {"url": write_data_url(data, media_type), "num_frames": num_frames}
                items.append({"type": "video_url", "video_url": shown})
            case _:
                assert_never(item)
    parts = list(_joined_texts(items))
    is_text = all(part["type"] == "text" for part in parts)
    content = "".join(part["text"] for part in parts) if is_text else parts
    message: dict[str, Any] = {"role": turn.role, "content": content}
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _joined_texts(items: Iterable[str | dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for is_text, some in itertools.groupby(items, lambda item: isinstance(item, str)):
        if not is_text:
            yield from cast(Iterable[dict[str, Any]], some)
        elif text := "".join(cast(Iterable[str], some)):
            yield {"type": "text", "text": text}


def _check_text(name: str, variable: Variable) -> None:
    """Raises ProgramError for what had no text to give: a value that is none."""
    if not variable.num_pieces and not isinstance(variable.now(), str):
        raise ProgramError(f"only text can be iterated, but {name!r} is a {type(variable.now()).__name__}")


def _meta(name: str, variable: Variable) -> dict[str, Any]:
    if variable.meta is None:
        raise UnknownVariableError(f"{name!r} was not set by a call of the model, so nothing is reported about it")
    return variable.meta
