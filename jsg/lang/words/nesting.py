"""The rules of turns and scopes.

The interpreter, the tracer and the check of graphs keep a `Nesting` for each stream, so a program has the same rules
wherever it runs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jsg.errors import ProgramError
from jsg.lang.words.ir import Role

JoinMode = Literal["gather_variable", "concate_and_append"]


@dataclasses.dataclass(frozen=True, slots=True)
class Nesting:
    """The open turn and scopes of a stream. A change gives a new `Nesting`, or raises ProgramError.

    Attributes:
        role: The role of the open turn.
        scopes: The names of the open scopes.
        has_turned: Whether a turn was opened or closed since the stream began.
    """

    role: Role | None = None
    scopes: tuple[str, ...] = ()
    has_turned: bool = False

    def turn(self, role: Role, *, is_begin: bool) -> "Nesting":
        """Gives the nesting after the beginning or the end of a turn."""
        if is_begin and self.role is not None:
            raise ProgramError(f"turns do not nest: {role} begins inside of {self.role}; end that first")
        if not is_begin and self.role != role:
            raise ProgramError(f"{role} ends, but {self.role or 'no turn'} is open")
        return Nesting(role if is_begin else None, self.scopes, True)

    def scope(self, name: str, *, is_begin: bool) -> "Nesting":
        """Gives the nesting after the beginning or the end of a scope."""
        if is_begin and name in self.scopes:
            raise ProgramError(f"var_scope {name!r} is open already")
        if not is_begin and name not in self.scopes:
            raise ProgramError(f"var_scope {name!r} ends, but was not opened in this state")
        scopes = (*self.scopes, name) if is_begin else tuple(scope for scope in self.scopes if scope != name)
        return Nesting(self.role, scopes, self.has_turned)

    def fork(self) -> "Nesting":
        """Gives the nesting of a new branch: the same turn, and no scope, because only the parent ends its scopes."""
        return Nesting(self.role)

    def check_body(self, before: "Nesting") -> None:
        """Raises ProgramError unless the same is open as `before` the body of a `cond` or `loop`."""
        if (self.role, self.scopes) != (before.role, before.scopes):
            raise ProgramError("the body of a cond or loop must close the turns and scopes that it opens, no others")


def check_join(branches: Sequence[Nesting], mode: JoinMode) -> None:
    """Raises ProgramError where branches cannot be joined in this mode."""
    if mode not in ("gather_variable", "concate_and_append"):
        raise ProgramError(f"join takes 'gather_variable' or 'concate_and_append', but got {mode!r}")
    for i, branch in enumerate(branches):
        if branch.scopes:
            raise ProgramError(f"var_scope {branch.scopes[-1]!r} of branch {i} is open; end it before the join")
        if branch.has_turned and mode == "concate_and_append":
            raise ProgramError(
                "concate_and_append puts the branches side by side inside one turn, or outside of any, but branch "
                f"{i} opened or closed a turn; open the turn before the fork and close it after the join"
            )
