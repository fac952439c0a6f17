"""Tells the thoughts of a model from its answer, in a whole text or as it comes.

A model that thinks writes its thoughts between two markers, and its answer behind them. Some chat templates write the
first marker themselves, so that the answer begins inside the thoughts. This file has the markers of each kind of model
as data, and is the one home of the split, for the server and for the language.
"""

import dataclasses
import enum
import itertools
from collections import deque
from collections.abc import Mapping
from typing import final

from jsg.errors import RequestError


@dataclasses.dataclass(frozen=True, slots=True)
class Markers:
    """The marks of the thoughts of a kind of model.

    Attributes:
        begin: The text that opens the thoughts.
        end: The text that closes them.
        starts_inside: Whether the answer begins with thoughts even if nobody wrote `begin`.
        gap: The text between `end` and the answer where a grammar governs the answer.
    """

    begin: str
    end: str
    starts_inside: bool = False
    gap: str = "\n\n"


_THINK = Markers("<think>", "</think>")
_THINK_INSIDE = Markers("<think>", "</think>", starts_inside=True)
_KIMI = Markers("◁think▷", "◁/think▷", gap="")
_MISTRAL = Markers("[THINK]", "[/THINK]", gap="")
_SEED = Markers("<seed:think>", "</seed:think>", gap="")
_COHERE = Markers("<|START_THINKING|>", "<|END_THINKING|>", gap="")
_GEMMA = Markers("<|channel>thought\n", "<channel|>", gap="")
_HARMONY = Markers("<|channel|>analysis<|message|>", "<|end|>", gap="<|start|>assistant<|channel|>final<|message|>")

MARKERS: Mapping[str, Markers] = {
    "cohere-command-a": _COHERE,
    "deepseek-r1": _THINK_INSIDE,
    "deepseek-v3": _THINK,
    "ernie45": _THINK,
    "gemma4": _GEMMA,
    "glm45": _THINK,
    "gpt-oss": _HARMONY,
    "hunyuan": _THINK,
    "kimi": _KIMI,
    "kimi-k2": _THINK,
    "minimax": _THINK,
    "minimax-append-think": _THINK_INSIDE,
    "mistral": _MISTRAL,
    "nemotron": _THINK,
    "olmo3": _THINK_INSIDE,
    "qwen3": _THINK,
    "qwen3-thinking": _THINK_INSIDE,
    "seed-oss": _SEED,
    "step3": _THINK_INSIDE,
}
"""The markers by the name of the parser, which is the `model_type` of `separate_reasoning` in the language."""

MARKER_TOKENS = frozenset(
    itertools.chain(
        *((each.begin, each.end) for each in MARKERS.values()),
        ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|channel>", "<channel|>"),
    )
)
"""The texts that are special tokens of some models and mark thoughts, or are a part of such a mark."""

ALIASES: Mapping[str, str] = {
    "cohere-command3": "cohere-command-a",
    "harmony": "gpt-oss",
    "hunyuan-a13b": "hunyuan",
    "magistral": "mistral",
    "minimax-m2": "minimax",
    "minimax-m2-append-think": "minimax-append-think",
    "nemotron-3": "nemotron",
    "nemotron-v3": "nemotron",
    "openai-gptoss": "gpt-oss",
}
"""Names that vLLM and SGLang have for these parsers → ours."""


def find_markers(name: str) -> Markers | None:
    """The markers of a kind of model, also under the names of vLLM and SGLang; None for an unknown one."""
    name = name.replace("_", "-")
    return MARKERS.get(ALIASES.get(name, name))


def markers_of(model_type: str) -> Markers:
    """Gives the markers of a kind of model. Raises RequestError for an unknown one."""
    found = find_markers(model_type)
    if found is None:
        raise RequestError(
            f"model_type must be one of {', '.join(sorted(MARKERS))}, but got {model_type!r}", param="model_type"
        )
    return found


def detect_markers(chat_template: str | None) -> Markers | None:
    """The markers that a chat template shows; None where it shows none."""
    text = chat_template or ""
    for markers in (_HARMONY, _GEMMA, _COHERE, _SEED, _KIMI, _MISTRAL, _THINK):
        if markers.begin.strip() in text or markers.end in text:
            return markers
    return None


class Phase(enum.Enum):
    """Where an answer is."""

    BEFORE = enum.auto()  # only white space so far, so thoughts may begin
    INSIDE = enum.auto()  # in the thoughts
    BETWEEN = enum.auto()  # behind the thoughts, where white space belongs to neither
    ANSWER = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Thoughts:
    """How one answer is split.

    Attributes:
        markers: The model's.
        begin_id: The special token that `markers.begin` is; None where it is text.
        end_id: The special token that `markers.end` is; None where it is text.
        phase: Where the answer begins: BEFORE, or INSIDE where the prompt has opened the thoughts.
        has_gap: Whether exactly `markers.gap` stands between the thoughts and the answer, because a grammar says so.
            Otherwise all white space there is dropped.
        is_split: Whether thoughts are told from the answer. Otherwise they are only counted, and stand in its text.
    """

    markers: Markers
    begin_id: int | None = None
    end_id: int | None = None
    phase: Phase = Phase.BEFORE
    has_gap: bool = False
    is_split: bool = True

    @classmethod
    def of(cls, markers: Markers) -> "Thoughts":
        """How an answer to a prompt that is not known is split, by the text of the markers."""
        return cls(markers, phase=Phase.INSIDE if markers.starts_inside else Phase.BEFORE)


def phase_behind(prompt_tail: str, markers: Markers) -> Phase:
    """Where an answer begins behind a prompt that ends so.

    BEFORE where the prompt says nothing of thoughts, INSIDE where it opens them, ANSWER where it ends them.
    """
    tail = prompt_tail.rstrip()
    if tail.endswith(markers.begin.rstrip()):
        return Phase.INSIDE
    if tail.endswith(markers.end.rstrip()):
        return Phase.ANSWER
    return Phase.INSIDE if markers.starts_inside else Phase.BEFORE


@final
class ThoughtSplitter:
    """Splits one answer, piece by piece; the pieces change nothing.

    White space around the thoughts, and between them and the answer, belongs to neither. Only thoughts at the beginning
    count: later markers are text of the answer.

    Invariants: `_held` is the text that was taken and not yet given or dropped; `_num_gone` is the number of characters
    before it.

    Attributes:
        phase: Where the answer is.
        begin_at: The character at which the thoughts begin, behind their marker; None before that.
        end_at: The character at which the end marker begins; None before that.
    """

    def __init__(self, thoughts: Thoughts):
        markers = thoughts.markers
        self.phase = Phase.BEFORE
        self.begin_at: int | None = None
        self.end_at: int | None = None
        self._starts_inside = thoughts.phase is Phase.INSIDE
        self._begin = markers.begin if thoughts.begin_id is None else None
        self._end = markers.end if thoughts.end_id is None else None
        self._gap = markers.gap if thoughts.has_gap else None
        self._held = ""
        self._num_gone = 0
        self._is_at_start = True  # nothing of the thoughts, or of what follows them, was given

    def feed(self, text: str) -> tuple[str, str]:
        """Takes text; gives the new thoughts and the new answer that are certain now."""
        self._held += text
        if self.phase is Phase.BEFORE:
            self._look_for_begin()
        thoughts = self._inside() if self.phase is Phase.INSIDE else ""
        if self.phase is Phase.BETWEEN:
            self._cross()
        return thoughts, self._drop(len(self._held)) if self.phase is Phase.ANSWER else ""

    def open(self) -> None:
        """Takes the special token that opens the thoughts. It does nothing where they may not begin."""
        if self.phase is Phase.BEFORE:
            self._enter(len(self._held))

    def close(self) -> tuple[str, str]:
        """Takes the special token that closes the thoughts. Gives what `feed` gives; nothing outside of thoughts."""
        if self.phase is Phase.BEFORE and self._starts_inside:
            self._enter(0)
        if self.phase is not Phase.INSIDE:
            return "", ""
        return self._leave(len(self._held), 0), ""

    def finish(self) -> tuple[str, str]:
        """Gives the thoughts and the answer that were held back, at the end."""
        if self.phase is Phase.BEFORE and self._starts_inside:
            self._enter(0)
        held, self._held = self._held, ""
        match self.phase:
            case Phase.INSIDE:
                return held.strip() if self._is_at_start else held.rstrip(), ""
            case Phase.BETWEEN:
                return "", held if self._gap is not None else ""
            case _:
                return "", held

    def _look_for_begin(self) -> None:
        bare = self._held.lstrip()
        num_blank = len(self._held) - len(bare)
        if self._begin is not None and bare.startswith(self._begin):
            self._enter(num_blank + len(self._begin))
        elif bare and (self._begin is None or not self._begin.startswith(bare)):
            if self._starts_inside:
                self._enter(0)
            else:
                self.phase = Phase.ANSWER

    def _enter(self, num_dropped: int) -> None:
        self._drop(num_dropped)
        self.begin_at = self._num_gone
        self.phase = Phase.INSIDE

    def _inside(self) -> str:
        end = self._end
        if end is not None and (at := self._held.find(end)) >= 0:
            return self._leave(at, len(end))
        num_kept = 0
        if end is not None:
            num_kept = max((n for n in range(1, len(end)) if self._held.endswith(end[:n])), default=0)
        sure = self._held[: len(self._held) - num_kept].rstrip()
        return self._given(self._drop(len(sure)))

    def _leave(self, at: int, marker_len: int) -> str:
        """Ends the thoughts at a held character, behind which there is the marker."""
        self.end_at = self._num_gone + at
        thoughts = self._given(self._drop(at).rstrip())
        self._drop(marker_len)
        self.phase = Phase.BETWEEN
        return thoughts

    def _given(self, text: str) -> str:
        """The next thoughts without the white space that they begin with."""
        if self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        return text

    def _cross(self) -> None:
        """Drops what stands between the thoughts and the answer."""
        if self._gap is None:
            self._drop(len(self._held) - len(self._held.lstrip()))
            if self._held:
                self.phase = Phase.ANSWER
        elif self._held.startswith(self._gap):
            self._drop(len(self._gap))
            self.phase = Phase.ANSWER
        elif not self._gap.startswith(self._held):
            self.phase = Phase.ANSWER

    def _drop(self, num: int) -> str:
        """Takes held text from its front."""
        text, self._held = self._held[:num], self._held[num:]
        self._num_gone += num
        return text


def split_thoughts(markers: Markers, text: str) -> tuple[str, str]:
    """The thoughts and the answer in a whole output."""
    splitter = ThoughtSplitter(Thoughts.of(markers))
    thoughts, answer = splitter.feed(text)
    more_thoughts, more_answer = splitter.finish()
    return thoughts + more_thoughts, answer + more_answer


@final
class ThoughtReader:
    """Splits one answer that comes token by token, and counts the tokens of its thoughts.

    A marker that is a special token of the model counts only as this token: its text, which a user may have typed and
    the model may quote, is text then.

    Attributes:
        num_tokens: The tokens of the thoughts so far, without those of their markers.
        num_to_end: The tokens of the output up to the end of the thoughts, with the end marker; 0 without thoughts.
    """

    def __init__(self, thoughts: Thoughts):
        self.num_tokens = self.num_to_end = 0
        self._thoughts = thoughts
        self._num_pushed = 0
        self._is_inside = False  # at the last token
        self._splitter = ThoughtSplitter(thoughts)
        self._num_chars = 0
        self._starts: deque[int] = deque()  # where the tokens begin that are not counted yet

    @property
    def is_over(self) -> bool:
        """Whether the rest of the answer has no thoughts, and nothing is held back."""
        return self._splitter.phase is Phase.ANSWER

    @property
    def may_begin(self) -> bool:
        """Whether thoughts may still begin: there was only white space so far."""
        return self._splitter.phase is Phase.BEFORE

    def marks(self, token_id: int) -> bool:
        """Whether a token is a marker by itself."""
        return token_id in (self._thoughts.begin_id, self._thoughts.end_id)

    def push(self, token_id: int, text: str) -> tuple[str, str]:
        """Takes the next token and the text that it adds; gives the new thoughts and the new answer.

        The text of a token that `marks` is what it adds to the text before it, and not its own.
        """
        is_mark = self.marks(token_id)
        self._num_pushed += 1
        if not is_mark:
            self._starts.append(self._num_chars)
        self._num_chars += len(text)
        found = self._splitter.feed(text)
        if is_mark and token_id == self._thoughts.end_id:
            thoughts, answer = self._splitter.close()
            found = found[0] + thoughts, found[1] + answer
        elif is_mark:
            self._splitter.open()
        self._count()
        return found

    def finish(self, text: str) -> tuple[str, str]:
        """Ends the answer with the text that no token has completed."""
        self._num_chars += len(text)
        thoughts, answer = self._splitter.feed(text)
        more_thoughts, more_answer = self._splitter.finish()
        self._count(is_last=True)
        return thoughts + more_thoughts, answer + more_answer

    def _count(self, *, is_last: bool = False) -> None:
        """Counts the tokens that begin inside of the thoughts. The last ones may still belong to the end marker."""
        begin, end = self._splitter.begin_at, self._splitter.end_at
        if begin is None:
            return
        if end is None or not self.num_to_end or self._is_inside:
            self.num_to_end = self._num_pushed
        self._is_inside = end is None
        if end is None:
            end = self._num_chars + 1 if is_last else self._num_chars - len(self._thoughts.markers.end)
        while self._starts and self._starts[0] < end:
            self.num_tokens += self._starts.popleft() >= begin
