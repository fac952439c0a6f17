"""Output tokens of one request → the text that its client sees, in pieces as they come and cut where it stops."""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import final

from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.growing_text import GrowingText
from jsg.processing.stop_strings import MakeFinder, StopFinder, find_stops
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.parts_reader import CallForm, PartsReader
from jsg.speech.answers.thoughts import ThoughtReader, Thoughts
from jsg.speech.answers.tool_calls import ContentDelta, ToolDelta, merged
from jsg.types import FinishReason, FinishType, SamplingParams, TokenLogprob


@dataclasses.dataclass(slots=True)
class AnswerDelta:
    """What one output, or several in a row, added to one answer. Nobody changes it; see `RequestOutput`.

    Attributes:
        text: New text, calls as the model wrote them. It may belong to tokens of earlier outputs, whose text was held
            back.
        token_ids: New tokens, up to and including the one that completed a stop string.
        finish: Set in the last delta. If the output had none, the text ended at a stop string, and the caller aborts
            the request in the engine.
        logprobs: One for each new token, if they were asked for.
        thoughts: New text of the thoughts before the answer, where they are split from it.
        scores: Those of the tokens that belong to the answer and not to its thoughts.
        read: New texts and calls, where the answer may call tools; else None.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    thoughts: str = ""
    scores: tuple[TokenLogprob, ...] = ()
    read: Sequence[ToolDelta] | None = None

    @property
    def only_text(self) -> str:
        """The text that it adds to the answer, if it adds nothing else that is shown; else empty."""
        if self.finish is not None or self.thoughts or self.scores or self.logprobs:
            return ""
        match self.read:
            case None:
                return self.text
            case [ContentDelta(text, ())]:
                return text
        return ""

    @property
    def parts(self) -> Sequence[ToolDelta]:
        """What it adds to the answer: texts and calls."""
        if self.read is not None:
            return self.read
        # A token may have no text, but it has a log-probability.
        return (ContentDelta(self.text, self.scores),) if self.text or self.scores else ()

    @staticmethod
    def join(deltas: Sequence["AnswerDelta"]) -> "AnswerDelta":
        """One delta in place of several that follow one another."""
        if len(deltas) == 1:
            return deltas[0]
        return AnswerDelta(
            text="".join(delta.text for delta in deltas),
            thoughts="".join(delta.thoughts for delta in deltas),
            token_ids=tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
            finish=deltas[-1].finish,
            logprobs=tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)),
            scores=tuple(itertools.chain.from_iterable(delta.scores for delta in deltas)),
            read=None if deltas[-1].read is None else merged([part for delta in deltas for part in delta.read or ()]),
        )


@final
class ScoreStream:
    """Shows no token of an answer, and all of its log-probabilities. What a token ended is an end by length."""

    can_stop = False
    parts = None
    num_thought_tokens = (0, 0)

    def push(
        self, _token_ids: Sequence[int], finish: FinishReason | None, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> AnswerDelta:
        """As `AnswerStream.push`."""
        if finish is not None and finish.type is FinishType.STOP:
            finish = FinishReason(FinishType.LENGTH)
        return AnswerDelta(finish=finish, logprobs=logprobs, scores=logprobs)


@final
class AnswerStream:
    """Turns the tokens of one answer into deltas.

    The stop string, or match of a stop pattern, that is complete first ends the answer; if several end with the same
    character, it is the longest. It counts only if token number `min_new_tokens` or a later one completes it. Text that
    may begin one is held back until that is decided. How the tokens are cut into pushes changes neither.

    A token is read once. Its text is thoughts or answer, and in the answer it is text or belongs to a call. Stop
    strings end texts, and neither thoughts nor calls.

    The caller aborts the request in the engine when a delta has a finish that it did not push.

    Attributes:
        parts: Finds the calls in the answer; None where it may have none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        prompt_tail_ids: Sequence[int] = (),
        patterns: MakeFinder | None = None,
        thoughts: Thoughts | None = None,
        calls: CallForm | None = None,
        is_scored: bool = False,
    ):
        """Starts before the first output token.

        Args:
            tokenizer: The model's.
            sampling: Its `stop`, `stop_regex`, `min_new_tokens`, `skip_special_tokens` and `no_stop_trim` are used.
            prompt_tail_ids: The last tokens of the prompt where the answer continues its text (see
                `IncrementalDetokenizer`); empty where the answer is a text of its own.
            patterns: Makes what finds matches of `stop_regex`; `constrained.stop_patterns.stop_patterns` gives it.
            thoughts: How thoughts are split from the answer; None where everything is the answer.
            calls: How the answer writes calls of tools; None where it may have none.
            is_scored: Whether log-probabilities are pushed.
        """
        assert patterns is not None or not sampling.stop_regex, "constrained/stop_patterns makes the finder"
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, prompt_tail_ids=prompt_tail_ids
        )
        has_stops = bool(sampling.stop or sampling.stop_regex)
        make_finder = functools.partial(find_stops, sampling.stop, patterns) if has_stops else None
        self.parts = None if calls is None else PartsReader(calls, make_finder)
        self._stops = None if make_finder is None else self.parts or make_finder()
        self._scored = self.parts if is_scored else None
        self._min_new_tokens = sampling.min_new_tokens
        self._no_stop_trim = sampling.no_stop_trim
        self._num_tokens = 0
        self._held = GrowingText()
        self._reader = None if thoughts is None else ThoughtReader(thoughts)
        self._thoughts = GrowingText()
        self._undecided = GrowingText()  # text that is thoughts or answer, where both are shown
        self._placed: list[TokenLogprob] = []
        self._unplaced: list[TokenLogprob] = []  # of tokens that are thoughts or answer
        self._is_finished = False
        # An answer of text alone takes a short way, until its end.
        self._is_text = not (has_stops or thoughts or calls or is_scored)

    @property
    def can_stop(self) -> bool:
        """Whether the text may end the answer."""
        return self._stops is not None

    @property
    def num_thought_tokens(self) -> tuple[int, int]:
        """The tokens of the thoughts so far without their markers, and those up to their end with all markers."""
        return (0, 0) if self._reader is None else (self._reader.num_tokens, self._reader.num_to_end)

    def push(
        self, token_ids: Sequence[int], finish: FinishReason | None, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> AnswerDelta:
        """Takes the next tokens, and why they are the last ones if they are.

        Returns what is new. After a finish everything is ignored, and the delta is empty.
        """
        if self._is_finished:
            return AnswerDelta()
        if self._is_text and finish is None:
            return AnswerDelta(self._detokenizer.push(token_ids), tuple(token_ids))
        ends = finish is not None and finish.type is FinishType.STOP and finish.matched in token_ids[-1:]
        # The stop token is no thought, so what comes before it ends first where there are thoughts.
        visible = token_ids[:-1] if ends and (self._reader is not None or not self._no_stop_trim) else token_ids
        stop = None
        hidden = logprobs[len(visible) :]  # of a stop token
        if self._is_plain and self._stops is None and self._scored is None:
            self._place(logprobs[: len(visible)])
            self._show(self._detokenizer.push(visible))
        else:
            for index, token_id in enumerate(visible):
                self._num_tokens += 1
                stop = self._take(self._text_of(token_id, logprobs[index : index + 1]))
                if stop is not None:
                    token_ids, hidden = token_ids[: index + 1], ()
                    break
        if finish is not None and stop is None:
            stop = self._take(self._last_text())
            if stop is None and self._no_stop_trim and len(visible) < len(token_ids):
                self._num_tokens += 1
                stop = self._take(self._detokenizer.push(token_ids[-1:]) + self._detokenizer.finish())
            stop = stop or self._end(is_cut=finish.type is not FinishType.STOP)
        if stop is not None:
            finish = FinishReason(FinishType.STOP, matched=stop)
        self._is_finished = finish is not None
        self._place(hidden)
        scores, self._placed = tuple(self._placed), []
        return AnswerDelta(
            self._release(),
            tuple(token_ids),
            finish,
            logprobs[: len(token_ids)],
            self._thoughts.take_all(),
            scores,
            None if self.parts is None else self.parts.take(is_last=self._is_finished),
        )

    @property
    def _is_plain(self) -> bool:
        """Whether all text to come is the answer's."""
        return self._reader is None or self._reader.is_over

    def _text_of(self, token_id: int, score: Sequence[TokenLogprob]) -> str:
        """The text that a token adds to the answer. What it adds to the thoughts is kept apart, and so is its score."""
        reader = self._reader
        if reader is None or reader.is_over:
            self._place(score)
            return self._detokenizer.push((token_id,))
        if not reader.is_split:
            self._place(score)
            return self._unsplit_text(token_id, reader)
        is_mark = reader.marks(token_id)
        text = self._detokenizer.finish() if is_mark else self._detokenizer.push((token_id,))
        thoughts, answer = reader.push(token_id, text)
        self._thoughts.append(thoughts)
        # A token may be white space, or the beginning of a character, that turns out to belong to the answer.
        is_undecided = reader.may_begin or self._detokenizer.is_inside_character
        if is_undecided or answer:
            self._unplaced += score
        if answer or not is_undecided:
            self._place(self._unplaced if answer else ())
            self._unplaced = []
        return answer

    def _unsplit_text(self, token_id: int, reader: ThoughtReader) -> str:
        """The text of a token where stop strings count. Thoughts are held without a look for stop strings."""
        text = self._detokenizer.push((token_id,))
        reader.push(token_id, "" if reader.marks(token_id) else text)
        self._undecided.append(text)
        if reader.may_begin:
            return ""
        text = self._undecided.take_all()
        if reader.has_thoughts:
            self._show(text)
            return ""
        return text

    def _last_text(self) -> str:
        """The text of the answer that was held back at its end."""
        text = self._detokenizer.finish()
        if self._reader is None or self._reader.is_over:
            return text
        thoughts, answer = self._reader.finish(text)
        if not self._reader.is_split:
            return self._undecided.take_all() + text
        self._thoughts.append(thoughts)
        self._place(self._unplaced if answer else ())
        return answer

    def _place(self, scores: Sequence[TokenLogprob]) -> None:
        """Takes the log-probabilities of tokens of the answer, whose text comes next."""
        self._placed += scores
        if self._scored is not None:
            self._scored.place(scores)

    def _show(self, text: str) -> None:
        """Adds text in which no stop string counts."""
        self._held.append(text)
        if self.parts is not None:
            self.parts.read(text)

    def _take(self, text: str) -> str | None:
        """Adds text. If a stop string ends in it, cuts there and returns what `_cut` does."""
        if self._stops is None:
            self._show(text)
            stop = None
        else:
            stop = self._look(text, self._stops)
        if self._scored is not None:
            self._scored.settle()
        return stop

    def _look(self, text: str, stops: StopFinder) -> str | None:
        start = 0
        for end, char in enumerate(text, start=1):
            if match_len := stops.advance(char):
                self._held.append(text[start:end])
                start = end
                if stop := self._cut(match_len, stops):
                    return stop
        self._held.append(text[start:])
        return None

    def _end(self, *, is_cut: bool) -> str | None:
        """Ends the text of an answer, which the model did not end itself if `is_cut`. Returns what `_cut` does."""
        found = self.parts.finish(is_cut=is_cut) if self.parts else self._stops.finish() if self._stops else 0
        return None if self._stops is None else self._cut(found, self._stops)

    def _cut(self, match_len: int, stops: StopFinder) -> str | None:
        """Cuts what is held at a stop string of this length, if it counts. A length of 0 is none.

        Returns the string, or the pattern that it matches.
        """
        if not match_len or self._num_tokens < self._min_new_tokens:
            return None
        held = self._held.take_all()
        answer = held[: len(held) - stops.len_after]
        self._held.append(answer if self._no_stop_trim else answer[:-match_len])
        if self.parts is not None:
            self.parts.stop(is_shown=self._no_stop_trim)
        return stops.pattern or answer[-match_len:]

    def _release(self) -> str:
        """Takes the text that is no longer held back."""
        held_len = 0 if self._is_finished or self._stops is None else self._stops.held_len
        return self._held.take(len(self._held) - held_len)
