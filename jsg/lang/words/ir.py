"""The expressions that a program may append to its state: frozen records, joined by `+`.

The interpreter runs them one by one, the tracer keeps them in a graph, and both read them with `match`. Nothing here
knows a backend.
"""

import dataclasses
import operator
from collections.abc import Collection, Coroutine
from typing import Any, Literal

from jsg.errors import ProgramError, RequestError
from jsg.parameters import Dtype, named, with_fields
from jsg.processing.parts import MediaFile
from jsg.speech.answers.thoughts import Markers

Role = Literal["system", "user", "assistant"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant")
DecisionKind = Literal["predicate", "choice", "score"]

REASONING_SUFFIX = "_reasoning_content"
"""Ends the name of the variable that holds the reasoning of a gen apart from its answer."""

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
"""The pattern of a whole number."""
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
"""The pattern of a number with or without a fraction."""
REGEX_BOOL = r"(True|False)"
"""The pattern of a truth value as Python writes it."""
REGEX_STR = r'"([^"\\\x00-\x1f\x7f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
"""The pattern of a JSON string in double quotes, which may have every character, punctuation included."""


class Expr:
    """An expression that can be appended to a program's state."""

    __slots__ = ()

    def __add__(self, other: "Expr | str") -> "ExprList":
        """Gives this expression, followed by `other`."""
        return ExprList((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: "Expr | str") -> "ExprList":
        """Gives `other`, followed by this expression."""
        return ExprList((*parts_of(other), *parts_of(self)))

    def __format__(self, spec: str) -> str:
        """Raises ProgramError: the text would hold the record, and no call would be made."""
        raise ProgramError(
            f"an expression ({type(self).__name__}) was put into text by an f-string or format, which makes no call of "
            'the model; join them by +: "Q: " + gen("a")'
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Text(Expr):
    """Constant text. Inside a turn, special tokens in it are plain characters."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class ExprList(Expr):
    """Expressions one after another. A list never holds a list."""

    items: tuple[Expr, ...]


GEN = named("gen")
"""The parameters of a gen."""
FORMS = tuple(name for name, parameter in GEN.items() if parameter.role in ("type", "grammar"))
"""The parameters of a gen that say what form the answer has. A gen may have one of them."""
_VALUES = operator.attrgetter(*GEN)
_NEUTRAL = {name: parameter.default for name, parameter in GEN.items() if parameter.has_neutral}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
@with_fields({name: (parameter.kind.type | None, None) for name, parameter in GEN.items()})
class SamplingArgs:
    """The arguments of a gen. None leaves a field to the defaults of the run, and then to those of the backend.

    The fields are the parameters of `GEN`. Fields that code reads by their name are declared here.
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
        """Gives the fields that are not None."""
        return {name: value for name, value in zip(GEN, _VALUES(self), strict=True) if value is not None}

    def over(self, defaults: "SamplingArgs") -> "SamplingArgs":
        """Gives these arguments, with `defaults` where a field is None."""
        return dataclasses.replace(defaults, **self.given())

    def asked(self) -> "SamplingArgs":
        """Gives these arguments, with None for each value that asks only for what a backend does anyway."""
        given = self.given().items()
        return SamplingArgs(**{n: value for n, value in given if not (n in _NEUTRAL and value == _NEUTRAL[n])})


def check_forms(names: Collection[str]) -> None:
    """Raises RequestError where more than one of these parameters says what form an answer has."""
    if len(forms := [name for name in FORMS if name in names]) > 1:
        raise RequestError(
            f"an answer has one form, but got {' and '.join(forms)}; leave out all but one", param=forms[1]
        )


PUBLISHED = SamplingArgs(**{name: GEN[name].default for name in GEN if not GEN[name].has_neutral})
"""The arguments of a gen where neither it nor the run of its program gives them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gen(Expr):
    """Lets the model continue. The continuation becomes the variable `name`; with None it is only text.

    Attributes:
        markers: What encloses thoughts before it. A grammar governs what follows them.
    """

    name: str | None
    args: SamplingArgs = SamplingArgs()
    markers: Markers | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Select(Expr):
    """Lets the model choose one of `choices`, which is appended and becomes the variable `name`.

    Attributes:
        method: The name of a choices method, see `lang/tokens/choices.py`.
        temperature: 0 takes the best choice; above it one is drawn by the probabilities. Of a decision, what the
            log-probabilities are divided by.
        seed: The seed of the draw.
        question: The text of a decision, see `lang/words/decisions.py`. It is asked in a branch, so that neither
            question nor choice is appended. None for a plain select.
        decision: The kind of the decision; None for a plain select.
    """

    name: str | None
    choices: tuple[str, ...]
    method: str
    temperature: float = 0.0
    seed: int | None = None
    question: str | None = None
    decision: DecisionKind | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Image(Expr):
    """A picture: the bytes of its file, which the backend decodes."""

    data: bytes = dataclasses.field(repr=False)
    media_type: str = "image/png"


@dataclasses.dataclass(frozen=True, slots=True)
class Video(Expr):
    """A video: the bytes of its file, or of the files of its frames. The model sees `num_frames` frames."""

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
    """Begins a scope, whose text becomes the variable `name`."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class VarScopeEnd(Expr):
    """Ends a scope."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class SeparateReasoning(Expr):
    """Appends `body`. The reasoning of its gens goes to `<name>_reasoning_content`, and only the rest to `<name>`.

    Attributes:
        body: The expression.
        model_type: The kind of the model, which decides the markers around its reasoning.
    """

    body: Expr
    model_type: str


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol(Expr):
    """A value that only a run has: an argument of a traced program, or a variable that it reads."""

    name: str
    kind: Literal["argument", "variable"] = "argument"


@dataclasses.dataclass(frozen=True, slots=True)
class MediaOf(Expr):
    """A picture or a video that an argument of a traced program brings.

    Attributes:
        symbol: The argument.
        num_frames: The number of frames of a video; None for a picture.
    """

    symbol: Symbol
    num_frames: int | None = None


def parts_of(value: Any) -> tuple[Expr, ...]:
    """Gives the expressions of a value that is appended: the value itself, its items, or a text.

    Raises:
        TypeError: The value is neither text nor an expression.
    """
    match value:
        case ExprList():
            return value.items
        case Expr():
            return (value,)
        case str():
            return (Text(value),) if str.__len__(value) else ()  # traced text has no `len`
    raise TypeError(
        f"a program is extended by text or by gen, select, image, ..., but got {type(value).__name__}{_advice(value)}"
    )


def _advice(value: Any) -> str:
    """Gives the end of a message about what was appended in place of an expression."""
    if value is None:
        return (
            ", which s.user(...) and its like give, because they append by themselves; write s.user(...) alone, or "
            "s += sgl.user(...)"
        )
    if isinstance(value, Coroutine):
        return "; await it: s += await s.aget(name)"
    if isinstance(value, bool | int | float):
        return "; write str(...)"
    if hasattr(value, "get_meta_info"):
        return (
            "; append one of its variables or its text, or make what is called a plain function that is given s, if it "
            "is to extend this prompt"
        )
    return "; call it" if callable(value) else ""
