"""What a program appends to its state, in the same way whether it is interpreted or traced: turns, scopes, branches."""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn, Self, final, overload

from jsg.errors import ProgramError
from jsg.lang.words.ir import Expr, Role, RoleBegin, RoleEnd, VarScopeBegin, VarScopeEnd
from jsg.lang.words.nesting import JoinMode


class Extendable(abc.ABC):
    """A state that a program extends."""

    __slots__ = ()

    @abc.abstractmethod
    def extend(self, value: "Expr | str") -> Self:
        """Appends text or an expression; does the same as `+=`."""

    def __add__(self, other: Any) -> NoReturn:
        """Raises ProgramError, because there are no two states of one prompt without a fork."""
        raise ProgramError("a state changes in place: write s += ...; for another continuation of it, fork it")

    @abc.abstractmethod
    def set_var(self, name: str, value: Any) -> None:
        """Sets a variable to a value; the prompt does not change."""

    @abc.abstractmethod
    def fork(self, size: int = 1, position_ids_offset: Sequence[int] | None = None) -> "ProgramStateGroup[Any]":
        """Makes states that begin as this one is now and run side by side. Waits for nothing.

        Args:
            size: The number of states.
            position_ids_offset: For each state a number by which the positions of its own text are shifted.
        """

    @overload
    def system(self, value: None = None) -> "Span": ...
    @overload
    def system(self, value: "Expr | str") -> None: ...
    def system(self, value: "Expr | str | None" = None) -> "Span | None":
        """Appends a turn of the system; without a value, `with s.system():` opens one."""
        return self._turn("system", value)

    @overload
    def user(self, value: None = None) -> "Span": ...
    @overload
    def user(self, value: "Expr | str") -> None: ...
    def user(self, value: "Expr | str | None" = None) -> "Span | None":
        """Appends a turn of the user; without a value, `with s.user():` opens one."""
        return self._turn("user", value)

    @overload
    def assistant(self, value: None = None) -> "Span": ...
    @overload
    def assistant(self, value: "Expr | str") -> None: ...
    def assistant(self, value: "Expr | str | None" = None) -> "Span | None":
        """Appends a turn of the assistant; without a value, `with s.assistant():` opens one."""
        return self._turn("assistant", value)

    def _turn(self, role: Role, value: "Expr | str | None") -> "Span | None":
        if value is None:
            return Span(self, RoleBegin(role), RoleEnd(role))
        self.extend(RoleBegin(role) + value + RoleEnd(role))
        return None

    def var_scope(self, name: str) -> "Span":
        """Makes the text that is appended inside a `with` block the variable `name`."""
        return Span(self, VarScopeBegin(name), VarScopeEnd(name))

    def __setitem__(self, name: str, value: Any) -> None:
        self.set_var(name, value)

    def copy(self, position_ids_offset: Sequence[int] | None = None) -> AbstractContextManager[Self]:
        """Makes one fork, which is joined at the end of the `with` block."""
        return joined_at_end(self.fork(1, position_ids_offset))


@final
class Span:
    """Appends `begin` and `end` around a block of `with` or `async with`. Where the block raises it appends no end."""

    def __init__(self, state: Extendable, begin: Expr, end: Expr) -> None:
        self._state = state
        self._begin = begin
        self._end = end

    def __enter__(self) -> None:
        self._state.extend(self._begin)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._state.extend(self._end)

    async def __aenter__(self) -> None:
        self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)


@final
class ProgramStateGroup[S: Extendable]:
    """The branches of a fork."""

    def __init__(self, states: list[S], join: Callable[[JoinMode], object]) -> None:
        """`join` joins the branches into the state from which they were forked."""
        self.states = states
        self._join = join

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, index: int) -> S:
        return self.states[index]

    def __setitem__(self, index: int, state: S) -> None:
        if self.states[index] is not state:  # `forks[i] += ...` assigns the branch itself
            raise ProgramError("a branch cannot be replaced by another state; extend it with +=")

    def __iter__(self) -> Iterator[S]:
        return iter(self.states)

    def __iadd__(self, value: "Expr | str | Sequence[Expr | str] | Callable[[int], Expr | str]") -> Self:
        if callable(value) and not isinstance(value, Expr):  # a trace's symbol is callable to refuse the call
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
            state.extend(each)
        return self

    def join(self, mode: JoinMode = "gather_variable") -> None:
        """Joins the branches into the state from which they were forked. Waits for nothing; the branches end.

        Args:
            mode: With "gather_variable" each name that a branch set becomes, in the parent, the list of the values of
                all branches, with None for a branch that did not set it. With "concate_and_append" the parent gets
                the text of the branches side by side: no branch sees another, and later text sees all.

        Raises:
            ProgramError: The branches were joined already, or one has an open scope. With "concate_and_append": the
                parent was extended since, or a branch opened or closed a turn.
        """
        self._join(mode)


@contextlib.contextmanager
def joined_at_end[S: Extendable](branches: ProgramStateGroup[S]) -> Iterator[S]:
    """Gives the branch of a fork of one to a `with` block, and joins it at the end of the block."""
    yield branches[0]
    branches.join()
