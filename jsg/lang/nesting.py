"""What is open behind what was appended to a state: the rules of turns and scopes.

Whoever appends keeps a `Nesting` for each stream: the interpreter, the tracer, and the check of graphs that came from
elsewhere. So a program breaks the same rules wherever it runs.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jsg.errors import ProgramError
from jsg.lang.ir import Role

JoinMode = Literal["gather_variable", "concate_and_append"]


@dataclasses.dataclass(frozen=True, slots=True)
class Nesting:
    """Of one stream. Every change gives a new one, or raises ProgramError.

    Attributes:
        role: Of the turn that is open.
        scopes: Names of the scopes that are open.
        has_turned: A turn was opened or closed since the stream began.
    """

    role: Role | None = None
    scopes: tuple[str, ...] = ()
    has_turned: bool = False

    def turn(self, role: Role, *, is_begin: bool) -> "Nesting":
        """Behind the beginning or the end of a turn."""
        if is_begin and self.role is not None:
            raise ProgramError(f"turns do not nest: {role} begins inside of {self.role}; end that first")
        if not is_begin and self.role != role:
            raise ProgramError(f"{role} ends, but {self.role or 'no turn'} is open")
        return Nesting(role if is_begin else None, self.scopes, True)

    def scope(self, name: str, *, is_begin: bool) -> "Nesting":
        """Behind the beginning or the end of a scope."""
        if is_begin and name in self.scopes:
            raise ProgramError(f"var_scope {name!r} is open already")
        if not is_begin and name not in self.scopes:
            raise ProgramError(f"var_scope {name!r} ends, but was not opened in this state")
        scopes = (*self.scopes, name) if is_begin else tuple(scope for scope in self.scopes if scope != name)
        return Nesting(self.role, scopes, self.has_turned)

    def fork(self) -> "Nesting":
        """Where a branch begins: in the same turn. What scopes are open is the parent's own affair."""
        return Nesting(self.role)

    def check_body(self, before: "Nesting") -> None:
        """Raises ProgramError unless as much is open as `before` the body of a `cond` or `loop`."""
        if (self.role, self.scopes) != (before.role, before.scopes):
            raise ProgramError("the body of a cond or loop must close the turns and scopes that it opens, no others")


def check_join(branches: Sequence[Nesting], mode: JoinMode) -> None:
    """Raises ProgramError where branches, as far as they are, cannot be joined so."""
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
