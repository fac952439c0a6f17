"""The state of a program: what its body extends, reads and forks."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, final

from jsg.errors import ProgramError
from jsg.lang.ir import Expr, Role, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from jsg.lang.nesting import JoinMode
from jsg.lang.places import program_place
from jsg.lang.reading import RunState, What
from jsg.lang.run import Run
from jsg.lang.streams.stream import Stream
from jsg.lang.streams.variables import Variable, known


@final
class ProgramState(RunState):
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

    # Reading.

    def __contains__(self, name: object) -> bool:
        return name in self._stream.variables

    def cancel(self) -> None:
        """Aborts what this state and its forks, or the whole program if it is the program's, have under way."""
        if self._stream is self._run.stream:
            self._run.cancel()
        else:
            self._stream.cancel()

    def _known(self, name: str) -> Variable | None:
        return self._stream.variables.get(name)

    @contextlib.contextmanager
    def _expected(self, name: str) -> Iterator[Variable]:
        if self._run.is_in_body():  # nobody else could set it while the body waits
            yield known(self._stream.variable(name))
            return
        expected = self._stream.expect(name, self._run.body_error)
        try:
            yield expected
        finally:
            self._stream.forget(expected)

    def _read(self, what: What) -> Variable:
        return self._stream.read(what)

    def _log(self) -> tuple[Variable, Variable | None]:
        return self._stream.log, self._stream.read("size") if self._run.is_in_body() else None

    def _reported(self, variable: Variable) -> Variable:
        return variable

    def _failure(self) -> BaseException | None:
        return self._stream.runner.failure or self._run.body_error

    def _check_may_block(self) -> None:
        self._run.check_may_block()

    def _interrupt(self) -> None:
        self._run.cancel()


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
