"""What a stream does, one after another.

These are a program's expressions with the variables that they set, and reads between them. Forks and joins are in
`runner.py`, for they name other streams.
"""

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal

from jsg.lang.backend import PromptItem
from jsg.lang.ir import Gen, Select
from jsg.lang.streams.reasoning import Markers
from jsg.lang.streams.variables import Variable

Place = tuple[str, int]
"""File and line of a program's statement."""


@dataclasses.dataclass(frozen=True, slots=True)
class Append:
    """Extends the prompt."""

    item: PromptItem
    place: Place | None


@dataclasses.dataclass(frozen=True, slots=True)
class Generate:
    """Lets the model continue; with `markers`, its reasoning becomes a variable of its own."""

    gen: Gen
    variable: Variable
    reasoning: Variable | None
    markers: Markers | None
    place: Place | None


@dataclasses.dataclass(frozen=True, slots=True)
class Choose:
    """Lets the model choose."""

    select: Select
    variable: Variable
    place: Place | None


@dataclasses.dataclass(frozen=True, slots=True)
class OpenScope:
    """From here on the text becomes a variable."""

    name: str
    place: Place | None


@dataclasses.dataclass(frozen=True, slots=True)
class CloseScope:
    """Up to here."""

    name: str
    variable: Variable
    place: Place | None


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """Tells what has come of all before it: nothing, the text, the turns, or how many pieces the text has."""

    read: Literal["nothing", "text", "turns", "size"]
    variable: Variable
    place: Place | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Later:
    """Ops that are not known before it is their turn; `variables` are those that they set."""

    expand: Callable[[], Awaitable[Sequence["ExprOp"]]]
    variables: dict[str, Variable]
    place: Place | None


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
    """Ends the stream."""

    place: Place | None = None


ExprOp = Append | Generate | Choose | OpenScope | CloseScope
"""What comes of an expression."""
