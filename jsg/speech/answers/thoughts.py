"""Separates the thoughts of a model from its answer, in a whole text or as it comes.

A model that thinks writes its thoughts between two markers, and its answer after them. Some chat templates write the
first marker themselves, so that the answer begins inside the thoughts. This file has the markers of each kind of model
as data, and is the one home of the split, for the server and for the language.
"""

import dataclasses
import enum
import itertools
import re
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
        header: What an answer without thoughts begins with. `gap` ends with it, and neither is ever text then.
    """

    begin: str
    end: str
    starts_inside: bool = False
    gap: str = ""
    header: str = ""

    def without_gap(self) -> "Markers":
        """The same markers, where something else writes and reads what comes before the answer."""
        return dataclasses.replace(self, gap="", header="")


_THINK = Markers("<think>", "</think>", gap="\n\n")
_THINK_INSIDE = dataclasses.replace(_THINK, starts_inside=True)
_THINK_CLOSE = dataclasses.replace(_THINK, gap="")
_KIMI = Markers("◁think▷", "◁/think▷")
_MISTRAL = Markers("[THINK]", "[/THINK]")
_SEED = Markers("<seed:think>", "</seed:think>")
_COHERE = Markers("<|START_THINKING|>", "<|END_THINKING|>")
_GEMMA = Markers("<|channel>thought\n", "<channel|>")
_HARMONY_HEADER = "<|channel|>final<|message|>"
_HARMONY = Markers(
    "<|channel|>analysis<|message|>",
    "<|end|>",
    gap=f"<|start|>assistant{_HARMONY_HEADER}",
    header=_HARMONY_HEADER,
)

MARKERS: Mapping[str, Markers] = {
    "cohere-command-a": _COHERE,
    "deepseek-r1": _THINK_INSIDE,
    "deepseek-v3": _THINK_CLOSE,
    "ernie45": _THINK,
    "gemma4": _GEMMA,
    "glm45": dataclasses.replace(_THINK, gap="\n"),
    "gpt-oss": _HARMONY,
    "hunyuan": _THINK,
    "kimi": _KIMI,
    "kimi-k2": _THINK_CLOSE,
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
"""The markers by the name of the parser, which is the `model_type` of `separate_reasoning` in the language.

A program may run against any endpoint, so some are of models that jsg does not load: Kimi-VL and Step 3.
"""

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
    """The markers that a chat template shows; None where it shows none. Its gap is the one that the template writes."""
    text = chat_template or ""
    for markers in (_HARMONY, _GEMMA, _COHERE, _SEED, _KIMI, _MISTRAL, _THINK):
        # An end alone must speak of thinking: other models end their turns with <|end|>.
        if markers.begin.strip() in text or ("think" in markers.end.lower() and markers.end in text):
            return dataclasses.replace(markers, gap=_shown_gap(text)) if markers is _THINK else markers
    return None


def _shown_gap(chat_template: str) -> str:
    """The line breaks that a template writes after `</think>`; those of Qwen3 where it writes no such marker."""
    # Where the marker is an argument or is looked for, nothing is written.
    written = re.findall(r"</think>(?!['\"]\s*(?:\)|in\b))((?:\\n|\n)*)", chat_template)
    return max((each.replace("\\n", "\n") for each in written), key=len, default=_THINK.gap)


class Phase(enum.Enum):
    """Where an answer is."""

    BEFORE = enum.auto()  # only white space so far, so thoughts may begin
    INSIDE = enum.auto()  # in the thoughts
    BETWEEN = enum.auto()  # after the thoughts, where white space belongs to neither
    ANSWER = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True)
class Thoughts:
    """How one answer is split.

    Attributes:
        markers: The model's.
        begin_id: The special token that `markers.begin` is; None where it is text.
        end_id: The special token that `markers.end` is; None where it is text.
        phase: Where the answer begins: BEFORE, or INSIDE where the prompt has opened the thoughts.
        has_gap: Whether exactly `markers.gap` is between the thoughts and the answer, because a grammar says so.
            Otherwise all white space there is dropped.
        is_split: Whether thoughts are separated from the answer. Otherwise they are only counted, and are in its text.
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


def phase_after(prompt_tail: str, markers: Markers, *, by_begin: bool = True, by_end: bool = True) -> Phase:
    """Where an answer begins, by the end of its prompt.

    BEFORE where the prompt says nothing of thoughts, INSIDE where it opens them, ANSWER where it ends them. The text of
    a marker counts only where it is asked for: otherwise somebody typed it, and the marker is a special token.
    """
    tail = prompt_tail.rstrip()
    if by_begin and tail.endswith(markers.begin.rstrip()):
        return Phase.INSIDE
    if by_end and tail.endswith(markers.end.rstrip()):
        return Phase.ANSWER
    return Phase.INSIDE if markers.starts_inside else Phase.BEFORE


@final
class ThoughtSplitter:
    """Splits one answer, piece by piece; the pieces change nothing.

    White space around the thoughts, and between them and the answer, belongs to neither. Only thoughts at the beginning
    count: later markers are text of the answer.

    Invariants: `_blanks`, then `_held`, is the text that was taken and neither given nor dropped. `_held` has no white
    space at its end, but where that may belong to a marker, and is no longer than a marker and the last piece.

    Attributes:
        phase: Where the answer is.
        begin_at: The character at which the thoughts begin, after their marker; None before that.
        end_at: The character at which the end marker begins; None before that.
    """

    def __init__(self, thoughts: Thoughts):
        markers = thoughts.markers
        self.phase = Phase.BEFORE
        self.begin_at: int | None = None
        self.end_at: int | None = None
        self._starts_inside = thoughts.phase is Phase.INSIDE
        self._begin = markers.begin if thoughts.begin_id is None else ""
        self._end = markers.end if thoughts.end_id is None else ""
        self._header = markers.header
        self._gap = markers.gap
        self._has_gap = thoughts.has_gap
        self._blanks: list[str] = []
        self._held = ""
        self._num_taken = 0
        self._is_at_start = True  # nothing of the thoughts was given

    def feed(self, text: str) -> tuple[str, str]:
        """Takes text; gives the new thoughts and the new answer that are certain now."""
        self._held += text
        self._num_taken += len(text)
        if self.phase is Phase.BEFORE:
            self._look_for_begin()
        thoughts = self._inside() if self.phase is Phase.INSIDE else ""
        if self.phase is Phase.BETWEEN:
            self._cross()
        return thoughts, self._take_all() if self.phase is Phase.ANSWER else ""

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
        match self.phase:
            case Phase.INSIDE:
                return self._given(self._take_all().rstrip()), ""
            case Phase.BETWEEN:  # what is held is the beginning of the gap
                return "", ""
            case _:
                return "", self._take_all()

    def _look_for_begin(self) -> None:
        bare = self._held.lstrip()
        if len(bare) < len(self._held):
            self._blanks.append(self._held[: len(self._held) - len(bare)])
            self._held = bare
        if self._begin and bare.startswith(self._begin):
            self._enter(len(self._begin))
        elif self._header and bare.startswith(self._header):
            self._blanks.clear()
            self._held = bare[len(self._header) :]
            self.phase = Phase.ANSWER
        elif bare and not any(marker.startswith(bare) for marker in (self._begin, self._header)):
            if self._starts_inside:
                self._enter(0)
            else:
                self.phase = Phase.ANSWER

    def _enter(self, num_dropped: int) -> None:
        self._blanks.clear()
        self._held = self._held[num_dropped:]
        self.begin_at = self._num_taken - len(self._held)
        self.phase = Phase.INSIDE

    def _inside(self) -> str:
        end = self._end
        if end and (at := self._held.find(end)) >= 0:
            return self._leave(at, len(end))
        num_kept = max((n for n in range(1, len(end)) if self._held.endswith(end[:n])), default=0)
        sure = self._held[: len(self._held) - num_kept]
        self._held = self._held[len(sure) :]
        shown = sure.rstrip()
        found = "".join((*self._blanks, shown)) if shown else ""
        if shown:
            self._blanks.clear()
        if len(shown) < len(sure):
            self._blanks.append(sure[len(shown) :])
        return self._given(found)

    def _leave(self, at: int, marker_len: int) -> str:
        """Ends the thoughts at a held character, after which there is the marker."""
        self.end_at = self._num_taken - len(self._held) + at
        shown, self._held = self._held[:at].rstrip(), self._held[at + marker_len :]
        found = "".join((*self._blanks, shown)) if shown else ""
        self._blanks.clear()
        self.phase = Phase.BETWEEN
        return self._given(found)

    def _given(self, text: str) -> str:
        """The next thoughts without the white space that they begin with."""
        if self._is_at_start:
            text = text.lstrip()
            self._is_at_start = not text
        return text

    def _cross(self) -> None:
        """Drops what is between the thoughts and the answer."""
        if not self._has_gap:
            self._held = self._held.lstrip()
        gap = self._gap if self._has_gap or self._header else ""
        if gap and self._held.startswith(gap):
            self._held = self._held[len(gap) :]
            self.phase = Phase.ANSWER
        elif self._has_gap or self._held:
            self.phase = Phase.BETWEEN if gap and gap.startswith(self._held) else Phase.ANSWER

    def _take_all(self) -> str:
        """All text that is held."""
        text = "".join((*self._blanks, self._held))
        self._blanks.clear()
        self._held = ""
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
        self._has_ended = False
        self._splitter = ThoughtSplitter(thoughts)
        self._num_chars = 0
        self._starts: deque[int] = deque()  # where the tokens begin that are not counted yet

    @property
    def is_over(self) -> bool:
        """Whether the rest of the answer has no thoughts, and nothing is held back."""
        return self._splitter.phase is Phase.ANSWER

    @property
    def is_split(self) -> bool:
        """As in `Thoughts`."""
        return self._thoughts.is_split

    @property
    def may_begin(self) -> bool:
        """Whether thoughts may still begin: there was only white space so far."""
        return self._splitter.phase is Phase.BEFORE

    @property
    def has_thoughts(self) -> bool:
        """Whether the output has thoughts."""
        return self._splitter.begin_at is not None

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
        if not self._has_ended:
            self.num_to_end = self._num_pushed
        self._has_ended = end is not None
        if end is None:
            end = self._num_chars + 1 if is_last else self._num_chars - len(self._thoughts.markers.end)
        while self._starts and self._starts[0] < end:
            self.num_tokens += self._starts.popleft() >= begin
