"""Values of a traced program that only a run has: arguments, variables, and text with them.

A symbol in text (`f"Q: {question}"`) writes a marker, which is found again when the text is appended. A marker has
every printable ASCII character, and white space at both ends, so that a string method that would have changed the value
(`strip`, `lower`, `replace`, a slice, ...) damages it, and a damaged marker is an error. Where Python keeps the class
of the text (`str(x)`, `f"{x}"`, `+`), it is a `TracedText`, which refuses to be read.
"""

import re
import secrets
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from jsg.errors import ProgramError, TraceError
from jsg.lang.graphs.nodes import ArgumentRef, Piece, ValueRef
from jsg.lang.streams.places import program_place
from jsg.lang.words.ir import ExprList, Symbol, Text

_OPEN, _CLOSE = "\U0010f5a1", "\U0010f5a2"  # of the private use plane 16, which no text uses
_CANARY = "".join(sorted(set(string.printable) - set(string.digits)))

ADVICE = (
    "a traced program has no values yet: put them into text (f-strings, +), branch with jsg.cond and jsg.loop, "
    "or give what is known beforehand to compile() as a constant"
)


def program_line() -> str:
    """Gives file name and line of the program's statement that runs."""
    place = program_place()
    return "?" if place is None else f"{Path(place[0]).name}:{place[1]}"


def traced(error: ProgramError) -> TraceError:
    """Gives the TraceError for a broken rule of the language, with the program's line."""
    return TraceError(f"{error}, at {program_line()}")


class Symbols:
    """The symbols of one trace, and the markers that stand for them in text."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._refs: list[ArgumentRef | ValueRef] = []
        self._marker = re.compile(f" {_OPEN}{self._nonce}{re.escape(_CANARY)}([0-9]+)/{self._nonce}{_CLOSE} ")

    def symbol(self, ref: ArgumentRef | ValueRef) -> "Traced":
        """Makes the symbol of a value that only a run has."""
        self._refs.append(ref)
        return Traced(ref, f" {_OPEN}{self._nonce}{_CANARY}{len(self._refs) - 1}/{self._nonce}{_CLOSE} ")

    def pieces(self, value: Any) -> tuple[Piece, ...]:
        """Gives the pieces of a text, of a symbol, or of texts and symbols joined by `+`.

        Raises:
            TraceError: A marker was damaged, or the value is none of these.
        """
        match value:
            case str():
                return self._split(plain(value))
            case Traced():
                return (value.ref,)
            case Text(text):
                return self._split(plain(text))
            case ExprList(items):
                return merge_pieces([piece for item in items for piece in self.pieces(item)])
        raise TraceError(f"expected text, but got {type(value).__name__} at {program_line()}")

    def is_symbolic(self, text: str) -> bool:
        """Says whether a text has a marker, damaged or not."""
        text = plain(text)
        return _OPEN in text or _CLOSE in text or self._nonce in text.lower()

    def _split(self, text: str) -> tuple[Piece, ...]:
        if not self.is_symbolic(text):
            return (text,) if text else ()
        pieces: list[Piece] = []
        for number, part in enumerate(self._marker.split(text)):
            if number % 2:
                pieces.append(self._refs[int(part)])
            elif self.is_symbolic(part):
                raise TraceError(
                    f"text that holds a value of a run was changed by a string method at {program_line()} or before; "
                    f"{ADVICE}"
                )
            elif part:
                pieces.append(part)
        return merge_pieces(pieces)


def merge_pieces(pieces: list[Piece]) -> tuple[Piece, ...]:
    """Gives the same text with neighbouring constants merged and empty ones left out."""
    merged: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        elif piece != "":
            merged.append(piece)
    return tuple(merged)


def plain(text: str) -> str:
    """Gives the same text as an ordinary `str`, which can be read."""
    return str.__str__(text)


_LOOKING = {
    "tested": "bool",
    "measured": "len",
    "gone through": "iter",
    "searched": "contains",
    "indexed": "getitem",
    "made a number": "int float index complex",
    "compared": "eq ne lt le gt ge",
    "looked up": "hash",
}
"""Operations that need the value: their names in messages, and the methods with which Python does them."""
_CALCULATING = "mul rmul sub rsub truediv rtruediv floordiv rfloordiv mod rmod pow rpow neg abs round"


def _refusing[Kind: type](operations: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """Decorates a class with methods that refuse these operations."""

    def refuse(what: str) -> Callable[..., NoReturn]:
        return lambda self, *args, **kwargs: _refuse(self, what)

    def decorate(kind: Kind) -> Kind:
        for what, names in operations.items():
            for name in names.split():
                setattr(kind, f"__{name}__", refuse(what))
        return kind

    return decorate


def _refuse(value: "TracedText | Traced | Mixed", what: str) -> NoReturn:
    is_text = type(value) is TracedText
    subject = "text that holds a value of a run" if is_text else f"the {value.kind} {value.name!r}"
    if type(value) is Mixed:
        subject += " is a list on one way through the program and one value on another, or holds lists, and"
    raise TraceError(f"{subject} is {what} at {program_line()}; {ADVICE}")


@_refusing({**_LOOKING, "calculated with": "mul rmul", "used as a format": "mod"})
class TracedText(str):
    """Text with markers. It can be appended and put into other text; it refuses to be read."""

    __slots__ = ()

    def __str__(self) -> str:
        return self

    def __format__(self, spec: str) -> str:
        if spec:
            _refuse(self, f"formatted as {spec!r}")
        return self

    def __repr__(self) -> str:
        return f"<traced text {plain(self)[:20].strip()}>"  # half a marker, as in `Traced`

    def __add__(self, other: str) -> str:
        return TracedText(plain(self) + plain(other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return TracedText(plain(other) + plain(self)) if isinstance(other, str) else NotImplemented

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            _refuse(self, f"asked for .{name}")
        return super().__getattribute__(name)


@_refusing({**_LOOKING, "calculated with": f"{_CALCULATING} add radd", "put into text": "str repr format"})
class Mixed:
    """A variable that text cannot read: a list of lists, or a list on only some ways through the program.

    It can only be kept, returned and given to other programs. `isinstance` of anything else is an error.
    """

    kind = "variable"

    def __init__(self, ref: ValueRef) -> None:
        self.ref = ref
        self.name = ref.name

    @property
    def __class__(self) -> NoReturn:  # pyright: ignore[reportIncompatibleMethodOverride] - `isinstance` asks for it
        _refuse(self, "asked for its type")


@_refusing({**_LOOKING, "calculated with": _CALCULATING, "called": "call"})
class Traced(Symbol):
    """A value that only a run has. It can only be appended, put into text and given to other programs."""

    __slots__ = ("marker", "ref")

    ref: ArgumentRef | ValueRef
    marker: str

    def __init__(self, ref: ArgumentRef | ValueRef, marker: str):
        super().__init__(ref.name, "argument" if isinstance(ref, ArgumentRef) else "variable")
        object.__setattr__(self, "ref", ref)  # a Symbol is frozen
        object.__setattr__(self, "marker", TracedText(marker))

    def __str__(self) -> str:
        return self.marker

    def __add__(self, other: Any) -> Any:
        if isinstance(other, str | Traced):
            return self.marker + str(other)
        return super().__add__(other)

    def __radd__(self, other: Any) -> Any:
        if isinstance(other, str):
            return other + self.marker
        return super().__radd__(other)

    def __format__(self, spec: str) -> str:
        if spec:
            _refuse(self, f"formatted as {spec!r}")
        return self.marker

    def __repr__(self) -> str:
        # Half a marker makes f"{value!r}" an error when it is appended, because it would lack the quotes of a run.
        return f"<traced {self.kind} {self.name!r} {plain(self.marker)[:20].strip()}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python itself looks for these attributes
        _refuse(self, f"asked for .{name}")
