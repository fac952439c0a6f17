"""The operations of a stream, one after another: expressions with the variables that they set, and marks between them.

Forks and joins are in `runner.py`, because they name other streams.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from typing import Literal, NamedTuple

from jsg.lang.streams.variables import Variable
from jsg.lang.words.backend import PromptItem
from jsg.lang.words.ir import Gen, Select, Text, VarScopeBegin, VarScopeEnd
from jsg.speech.answers.thoughts import Markers


class Place(NamedTuple):
    """A program's statement.

    Attributes:
        file: The name of its file.
        line: Its line.
        node: The number of its node, where a graph runs.
    """

    file: str
    line: int
    node: int | None = None


Make = Callable[[], Awaitable[Text | Select | None]]
"""Gives an expression that is not known before its turn; None where there is nothing to append. A select is made for a
select, because it sets the variable of the op."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExprOp:
    """Executes an expression.

    Attributes:
        expr: The expression.
        place: The program's statement.
        variables: The variables that it sets: the answer of a gen and, if the program separates it, its reasoning.
        markers: The markers of that reasoning.
        make: Makes the expression that is executed in place of `expr`.
    """

    expr: PromptItem | Gen | Select | VarScopeBegin | VarScopeEnd
    place: Place | None
    variables: tuple[Variable, ...] = ()
    markers: Markers | None = None
    make: Make | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """Reports what all ops before it made: nothing, the text, the turns, or the number of pieces of the text."""

    read: Literal["nothing", "text", "turns", "size"]
    variable: Variable
    place: Place | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Close:
    """Ends the stream."""

    place: Place | None = None
