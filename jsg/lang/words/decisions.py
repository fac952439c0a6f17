"""Decisions: typed questions about an input, which a model answers with probabilities.

A question is a text after the input and the labels of its answers. The labels are scored as the beginning of the
model's answer, as `select` scores choices, so a label may have any number of tokens and begin with another label. Two
numbers come of it. The probabilities say how likely each label is, given that the answer begins with one of them. The
label mass says how likely it is that the answer begins with one of them at all: if it is small, the model would rather
have said something else, and the probabilities say little.

`/v1/decisions`, `/v1/systemone` and `decide` of the language are forms of this module.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self, final

from jsg.errors import RequestError
from jsg.lang.words.backend import PromptItem, Selection
from jsg.lang.words.ir import DecisionKind, Role, RoleBegin, RoleEnd, Text

MAX_QUESTIONS = 400
MAX_LABELS = 255
YES, NO = "Yes", "No"
BETWEEN = "\n\n"
"""Stands between the input and a question in the same turn."""
RAW_CUE = "\nAnswer:"
"""Ends a question where there are no turns. A label then begins with a blank."""

type Option = tuple[str, str | None]
"""A label and its description."""


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A question.

    Attributes:
        kind: What the answer is: the probability of "yes", one of the labels, or a level, the labels being the levels.
        text: The text that the model is asked, which names the labels.
        labels: The beginnings of its answers.
    """

    kind: DecisionKind
    text: str
    labels: tuple[str, ...]


def predicate(instructions: str, if_yes: str | None = None, if_no: str | None = None) -> Question:
    """The question whether something is so. The other arguments describe when it is, and when it is not."""
    described = [(label, text) for label, text in ((YES, if_yes), (NO, if_no)) if text is not None]
    return Question("predicate", _asked(instructions, f"Answer {YES} or {NO}.", described), (YES, NO))


def choice(instructions: str, options: Sequence[Option]) -> Question:
    """The question which of several labels is right."""
    return _listed("choice", instructions, "Answer with one of these:", options)


def score(instructions: str, levels: Sequence[Option]) -> Question:
    """The question which level is reached. The levels are in order, the lowest first."""
    return _listed("score", instructions, "Answer with one of these levels, the lowest first:", levels)


def _listed(kind: DecisionKind, instructions: str, request: str, options: Sequence[Option]) -> Question:
    return Question(kind, _asked(instructions, request, options), tuple(label for label, _ in options))


def _asked(instructions: str, request: str, options: Iterable[Option]) -> str:
    lines = [f"- {label}" if text is None else f"- {label}: {text}" for label, text in options]
    return "\n".join([instructions, request, *lines])


def check_labels(labels: Sequence[str], param: str, *, least: int = 2) -> None:
    """Raises RequestError where there are too few or too many labels, or one is empty or there twice."""
    if not least <= len(labels) <= MAX_LABELS:
        raise RequestError(
            f"{param} must have {least} to {MAX_LABELS} items, but has {len(labels)}; ask several questions, or none",
            param,
        )
    for index, label in enumerate(labels):
        if not label:
            raise RequestError(f"{param}[{index}] must have at least one character, but is empty; name it", param)
    if len(set(labels)) < len(labels):
        twice = next(label for index, label in enumerate(labels) if label in labels[:index])
        raise RequestError(f"{param} must be different, but {twice[:100]!r} is there twice; leave one out", param)


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The answer to a question.

    Attributes:
        kind: The kind of the question.
        probabilities: The probability of each label; they sum to 1.
        label_mass: The probability that the answer begins with one of the labels; None where it is not known.
    """

    kind: DecisionKind
    probabilities: tuple[float, ...]
    label_mass: float | None

    @classmethod
    def of(cls, kind: DecisionKind, selection: Selection, temperature: float = 1.0) -> Self:
        """The decision from what a backend says of the labels.

        Args:
            kind: The kind of the question.
            selection: The selection among the labels, with their probabilities.
            temperature: Their log-probabilities are divided by it, and are probabilities again then. It calibrates.
        """
        assert selection.probabilities is not None, "backends without probabilities refuse a decision"
        largest = max(selection.probabilities)
        weights = [(each / largest) ** (1 / temperature) for each in selection.probabilities]
        total = math.fsum(weights)
        probabilities = selection.probabilities if temperature == 1 else tuple(each / total for each in weights)
        mass = selection.meta.get("label_mass")
        return cls(kind, probabilities, mass)

    @property
    def best(self) -> int:
        """The number of the likeliest label, the first where several are."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def level(self) -> float:
        """The expected number of the label, counted from 0: the score."""
        return math.fsum(index * each for index, each in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """How far the probabilities are from equal ones: 0 for equal ones, 1 for a certain label.

        These are the formulas of System One. Of a choice, the excess of the likeliest label over chance. Of a score,
        one less the mean distance from the likeliest level, in units of what it is for equal probabilities.
        """
        number = len(self.probabilities)
        if number == 1:
            return 1.0
        if self.kind == "score":
            best = self.best
            distance = math.fsum(each * abs(index - best) for index, each in enumerate(self.probabilities))
            middle = (number - 1) / 2
            value = 1 - distance / (math.fsum(abs(index - middle) for index in range(number)) / number)
        else:
            value = (number * max(self.probabilities) - 1) / (number - 1)
        return min(1.0, max(0.0, value))

    def report(self) -> dict[str, Any]:
        """What a program learns besides the probabilities of all labels."""
        match self.kind:
            case "predicate":
                own: Mapping[str, Any] = {"probability": self.probabilities[0]}
            case "choice":
                own = {"confidence": self.confidence}
            case "score":
                own = {"score": self.level, "confidence": self.confidence}
        return {"probabilities": self.probabilities, **own, "label_mass": self.label_mass}


def items_of(question: str, role: Role | None, *, has_turns: bool, is_begun: bool) -> list[PromptItem]:
    """What a prompt is extended by so that the model answers a question.

    Args:
        question: The text of the question.
        role: The role of the open turn, which this closes.
        has_turns: Whether the prompt has turns. If it has none, this opens none.
        is_begun: Whether the open turn, or the prompt without turns, has a text already.
    """
    if not has_turns:
        return [Text(f"{BETWEEN if is_begun else ''}{question}{RAW_CUE} ")]  # a label is encoded with the blank
    if role == "user":
        items: list[PromptItem] = [Text(f"{BETWEEN if is_begun else ''}{question}")]
    else:
        before = [] if role is None else [RoleEnd(role)]
        items = [*before, RoleBegin("user"), Text(question)]
    return [*items, RoleEnd("user"), RoleBegin("assistant")]
