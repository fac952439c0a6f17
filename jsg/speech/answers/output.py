"""Output tokens of one request → the text that its client sees, in pieces as they come and cut where it stops."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import final

from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.growing_text import GrowingText
from jsg.processing.stop_strings import StopFinder, StopMatcher
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.thoughts import ThoughtReader, Thoughts
from jsg.types import FinishReason, FinishType, SamplingParams, TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class AnswerDelta:
    """What one output, or several in a row, added to one answer.

    Attributes:
        text: New text. It may belong to tokens of earlier outputs, whose text was held back.
        token_ids: New tokens, up to and including the one that completed a stop string.
        finish: Set in the last delta. If the output had none, the text ended at a stop string, and the caller aborts
            the request in the engine.
        logprobs: One for each new token, if they were asked for.
        thoughts: New text of the thoughts before the answer, where they are split from it.
        scores: Those of the tokens that belong to the answer and not to its thoughts.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    thoughts: str = ""
    scores: tuple[TokenLogprob, ...] = ()

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
        )


@final
class ScoreStream:
    """Shows no token of an answer, and all of its log-probabilities. What a token ended is an end by length."""

    can_stop = False
    num_thought_tokens = (0, 0)

    def push(
        self, _token_ids: Sequence[int], finish: FinishReason | None, logprobs: tuple[TokenLogprob, ...] = ()
    ) -> AnswerDelta:
        """As `OutputStream.push`."""
        if finish is not None and finish.type is FinishType.STOP:
            finish = FinishReason(FinishType.LENGTH)
        return AnswerDelta(finish=finish, logprobs=logprobs, scores=logprobs)


@final
class OutputStream:
    """Turns the tokens of one answer into deltas.

    The stop string, or match of a stop pattern, that is complete first ends the answer; if several end with the same
    character, it is the longest. It counts only if token number `min_new_tokens` or a later one completes it. Text that
    may begin one is held back until that is decided. How the tokens are cut into pushes changes neither.

    Where thoughts come before the answer, they are split from it first: stop strings end answers and no thoughts.

    The caller aborts the request in the engine when a delta has a finish that it did not push.

    Attributes:
        can_stop: Whether the text may end the answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        prompt_tail_ids: Sequence[int] = (),
        stops: StopFinder | None = None,
        thoughts: Thoughts | None = None,
    ):
        """Starts before the first output token.

        Args:
            tokenizer: The model's.
            sampling: Its `stop`, `stop_regex`, `min_new_tokens`, `skip_special_tokens` and `no_stop_trim` are used.
            prompt_tail_ids: The last tokens of the prompt where the answer continues its text (see
                `IncrementalDetokenizer`); empty where the answer is a text of its own.
            stops: Finds what `stop` and `stop_regex` say; None looks for the strings in all of the text.
            thoughts: How thoughts are split from the answer; None where everything is the answer.
        """
        assert stops is not None or not sampling.stop_regex, "constrained/stop_patterns makes the finder"
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, prompt_tail_ids=prompt_tail_ids
        )
        self.can_stop = stops is not None or bool(sampling.stop)
        self._stops = stops or StopMatcher(sampling.stop)
        self._has_stops = bool(sampling.stop or sampling.stop_regex)
        self._min_new_tokens = sampling.min_new_tokens
        self._no_stop_trim = sampling.no_stop_trim
        self._num_tokens = 0
        self._held = GrowingText()
        self._reader = None if thoughts is None else ThoughtReader(thoughts)
        self._is_split = thoughts is not None and thoughts.is_split
        self._thoughts = GrowingText()
        self._undecided = GrowingText()  # text that is thoughts or answer, where both are shown
        self._placed: list[TokenLogprob] = []
        self._unplaced: list[TokenLogprob] = []  # of tokens that are thoughts or answer
        self._is_finished = False

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
        ends = finish is not None and finish.type is FinishType.STOP and finish.matched in token_ids[-1:]
        # The stop token is no thought, so what comes before it ends first where there are thoughts.
        visible = token_ids[:-1] if ends and (self._reader is not None or not self._no_stop_trim) else token_ids
        stop = None
        hidden = logprobs[len(visible) :]  # of a stop token
        if self._is_plain and not self._has_stops:
            self._held.append(self._detokenizer.push(visible))
            self._placed += logprobs[: len(visible)]
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
            stop = stop or self._cut(self._stops.finish())
        if stop is not None:
            finish = FinishReason(FinishType.STOP, matched=stop)
        self._is_finished = finish is not None
        thoughts = self._thoughts.take_all()
        scores, self._placed = (*self._placed, *hidden), []
        return AnswerDelta(self._release(), tuple(token_ids), finish, logprobs[: len(token_ids)], thoughts, scores)

    @property
    def _is_plain(self) -> bool:
        """Whether all text to come is the answer's."""
        return self._reader is None or self._reader.is_over

    def _text_of(self, token_id: int, score: Sequence[TokenLogprob]) -> str:
        """The text that a token adds to the answer. What it adds to the thoughts is kept apart, and so is its score."""
        reader = self._reader
        if reader is None or reader.is_over:
            self._placed += score
            return self._detokenizer.push((token_id,))
        if not self._is_split:
            self._placed += score
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
            self._placed += self._unplaced if answer else []
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
            self._held.append(text)
            return ""
        return text

    def _last_text(self) -> str:
        """The text of the answer that was held back at its end."""
        text = self._detokenizer.finish()
        if self._reader is None or self._reader.is_over:
            return text
        thoughts, answer = self._reader.finish(text)
        if not self._is_split:
            return self._undecided.take_all() + text
        self._thoughts.append(thoughts)
        self._placed += self._unplaced if answer else []
        return answer

    def _take(self, text: str) -> str | None:
        """Adds text to what is held. If a stop string ends in it, cuts there and returns what `_cut` does."""
        start = 0
        for end, char in enumerate(text, start=1):
            if match_len := self._stops.advance(char):
                self._held.append(text[start:end])
                start = end
                stop = self._cut(match_len)
                if stop is not None:
                    return stop
        self._held.append(text[start:])
        return None

    def _cut(self, match_len: int) -> str | None:
        """Cuts what is held at a stop string of this length, if it counts. A length of 0 is none.

        Returns the string, or the pattern that it matches.
        """
        if not match_len or self._num_tokens < self._min_new_tokens:
            return None
        held = self._held.take_all()
        answer = held[: len(held) - self._stops.behind_len]
        self._held.append(answer if self._no_stop_trim else answer[:-match_len])
        return self._stops.pattern or answer[-match_len:]

    def _release(self) -> str:
        """Takes the text that is no longer held back."""
        held_len = 0 if self._is_finished else self._stops.held_len
        return self._held.take(len(self._held) - held_len)
