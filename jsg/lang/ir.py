"""What a program may append to its state: frozen expressions, joined by `+`.

The interpreter runs them one by one, the tracer keeps them in a graph, and both read them with `match`. Nothing here
knows a backend.
"""

import dataclasses
import operator
from collections.abc import Collection
from typing import Any, Literal

from jsg.errors import RequestError
from jsg.parameters import Dtype, named, with_fields
from jsg.processing.parts import MediaFile

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")

REASONING_SUFFIX = "_reasoning_content"
"""Ends the name of the variable that holds the reasoning of a gen apart from its answer."""

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
"""What a whole number matches."""
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
"""A number with or without a fraction."""
REGEX_BOOL = r"(True|False)"
"""A truth value as Python writes it."""
REGEX_STR = r'"([^"\\\x00-\x1f\x7f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
"""A string as JSON writes it, in double quotes: every character is possible, punctuation included."""


class Expr:
    """Something that can be appended to a program's state."""

    __slots__ = ()

    def __add__(self, other: "Expr | str") -> "ExprList":
        """This, then `other`."""
        return ExprList((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: "Expr | str") -> "ExprList":
        """`other`, then this."""
        return ExprList((*parts_of(other), *parts_of(self)))


@dataclasses.dataclass(frozen=True, slots=True)
class Text(Expr):
    """Constant text. Special tokens written in it are plain characters inside a turn."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ExprList(Expr):
    """Expressions one after another; never a list in a list."""

    items: tuple[Expr, ...]


GEN = named("gen")
"""The parameters of a gen."""
FORMS = tuple(name for name, parameter in GEN.items() if parameter.role in ("type", "grammar"))
"""Those of them that say what form the answer has; a gen may have one."""
_VALUES = operator.attrgetter(*GEN)
_NEUTRAL = {name: parameter.default for name, parameter in GEN.items() if parameter.has_neutral}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
@with_fields({name: (parameter.kind.type | None, None) for name, parameter in GEN.items()})
class SamplingArgs:
    """How to continue. None leaves a field to the defaults of the run, and then to those of the backend.

    The fields are the parameters of `GEN`. Those that some code reads by their name are declared here.
    """

    max_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    seed: int | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    dtype: Dtype | None = None
    json_schema: str | None = None

    def given(self) -> dict[str, Any]:
        """The fields that are not None."""
        return {name: value for name, value in zip(GEN, _VALUES(self), strict=True) if value is not None}

    def over(self, defaults: "SamplingArgs") -> "SamplingArgs":
        """These, with `defaults` where a field is None."""
        return dataclasses.replace(defaults, **self.given())

    def asked(self) -> "SamplingArgs":
        """These, with None where a value asks for nothing that a backend does not do anyway."""
        given = self.given().items()
        return SamplingArgs(**{n: value for n, value in given if not (n in _NEUTRAL and value == _NEUTRAL[n])})


def check_forms(names: Collection[str]) -> None:
    """Raises RequestError where more than one of these parameters says what form an answer has."""
    if len(forms := [name for name in FORMS if name in names]) > 1:
        raise RequestError(
            f"an answer has one form, but got {' and '.join(forms)}; leave out all but one", param=forms[1]
        )


PUBLISHED = SamplingArgs(**{name: GEN[name].default for name in GEN if not GEN[name].has_neutral})
"""What a gen is given where neither it nor the run of its program says something."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Let the model continue; the continuation becomes the variable `name` (None: only text)."""

    name: str | None
    args: SamplingArgs = SamplingArgs()


@dataclasses.dataclass(frozen=True, slots=True)
class Select(Expr):
    """Let the model choose one of `choices`, which is appended and becomes the variable `name`.

    Attributes:
        method: Name of a choices method, see `lang/choices.py`.
        temperature: 0 takes the best; above it the choice is sampled from the probabilities.
        seed: Of that sampling.
    """

    name: str | None
    choices: tuple[str, ...]
    method: str
    temperature: float = 0.0
    seed: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Image(Expr):
    """A picture: the bytes of its file, as they are. What they are a picture of is the backend's to decode."""

    data: bytes = dataclasses.field(repr=False)
    media_type: str = "image/png"


@dataclasses.dataclass(frozen=True, slots=True)
class Video(Expr):
    """A video: the bytes of its file, or those of its frames' files; `num_frames` frames are shown."""

    data: MediaFile = dataclasses.field(repr=False)
    num_frames: int
    media_type: str = "video/mp4"


@dataclasses.dataclass(frozen=True, slots=True)
class RoleBegin(Expr):
    """Opens a turn."""

    role: Role


@dataclasses.dataclass(frozen=True, slots=True)
class RoleEnd(Expr):
    """Closes the turn of that role."""

    role: Role


@dataclasses.dataclass(frozen=True, slots=True)
class VarScopeBegin(Expr):
    """From here on the text becomes the variable `name`."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class VarScopeEnd(Expr):
    """Up to here."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class SeparateReasoning(Expr):
    """`body`, of whose gens the reasoning goes to `<name>_reasoning_content` and only the rest to `<name>`.

    Attributes:
        body: What is appended.
        model_type: Which markers the model writes around its reasoning.
    """

    body: Expr
    model_type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol(Expr):
    """A value that is not known yet: an argument of a traced program, or a variable that a traced program reads."""

    name: str
    kind: Literal["argument", "variable"] = "argument"


@dataclasses.dataclass(frozen=True, slots=True)
class MediaOf(Expr):
    """A picture or a video that an argument of a traced program brings.

    Attributes:
        symbol: The argument.
        num_frames: Of a video; None for a picture.
    """

    symbol: Symbol
    num_frames: int | None = None


def parts_of(value: Any) -> tuple[Expr, ...]:
    """The expressions of something appended: itself, its items, or a text.

    Raises:
        TypeError: It is neither text nor an expression.
    """
    match value:
        case ExprList():
            return value.items
        case Expr():
            return (value,)
        case str():
            return (Text(value),) if str.__len__(value) else ()  # traced text may not be measured
    raise TypeError(f"a program is extended by text or by gen, select, image, ..., but got {type(value).__name__}")
