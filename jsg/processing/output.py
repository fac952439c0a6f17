"""Output tokens of one request → the text its client sees: detokenised, cut where it stops, in pieces as they come."""

import dataclasses
from collections.abc import Sequence
from typing import final

from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.stop_strings import StopFinder, StopMatcher
from jsg.processing.tokenizer import Tokenizer
from jsg.types import FinishReason, FinishType, SamplingParams


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    """What one push adds to an answer.

    Attributes:
        text: New text. It may belong to tokens of earlier pushes, which were held back.
        token_ids: New tokens; on a stop string, up to and including the one that completed it.
        finish: Set once, in the last delta of an answer.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None


@final
class OutputStream:
    """Turns the tokens of one answer into text deltas.

    The stop string, or match of a stop pattern, that is complete first ends the answer; of several that end with the
    same character, the longest. It counts only when completed by token number `min_new_tokens` or a later one. Text
    that may be the beginning of one is held back until that is decided. Neither depends on how the tokens are cut into
    pushes.

    The caller aborts the request in the engine when a delta has a finish that it did not push.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        prompt_tail_ids: Sequence[int] = (),
        stops: StopFinder | None = None,
    ):
        """Starts before the first output token.

        Args:
            tokenizer: Of the model that makes the tokens.
            sampling: Its `stop`, `stop_regex`, `min_new_tokens`, `skip_special_tokens` and `no_stop_trim` are used.
            prompt_tail_ids: The last tokens of the prompt where the answer continues its text (see
                `IncrementalDetokenizer`); empty where the answer is a text of its own.
            stops: Looks for what `stop` and `stop_regex` say; None looks for the strings in all of the text.
        """
        assert stops is not None or not sampling.stop_regex, "constrained/stop_patterns makes the finder"
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.skip_special_tokens, prompt_tail_ids=prompt_tail_ids
        )
        self._stops = stops or StopMatcher(sampling.stop)
        self._has_stops = bool(sampling.stop or sampling.stop_regex)
        self._min_new_tokens = sampling.min_new_tokens
        self._no_stop_trim = sampling.no_stop_trim
        self._num_tokens = 0
        self._held = ""
        self._is_finished = False

    @property
    def is_finished(self) -> bool:
        """Whether the last delta has been given."""
        return self._is_finished

    def push(self, token_ids: Sequence[int], finish: FinishReason | None) -> TextDelta:
        """Takes the next tokens, and why they are the last ones where they are.

        Returns what is new. After a finish everything is ignored and the delta is empty.
        """
        if self._is_finished:
            return TextDelta()
        visible = token_ids[:-1] if self._hides_last_token(token_ids, finish) else token_ids
        stop = None
        if not self._has_stops:
            self._held += self._detokenizer.push(visible)
        else:
            for index, token_id in enumerate(visible):
                self._num_tokens += 1
                stop = self._take(self._detokenizer.push((token_id,)))
                if stop is not None:
                    token_ids = token_ids[: index + 1]
                    break
        if finish is not None and stop is None:
            stop = self._take(self._detokenizer.finish()) or self._cut(self._stops.finish())
        if stop is not None:
            finish = FinishReason(FinishType.STOP, matched=stop)
        self._is_finished = finish is not None
        return TextDelta(self._release(), tuple(token_ids), finish)

    def _hides_last_token(self, token_ids: Sequence[int], finish: FinishReason | None) -> bool:
        """Whether the last token is the stop token that is to be cut off."""
        if finish is None or finish.type is not FinishType.STOP or self._no_stop_trim or not token_ids:
            return False
        return finish.matched == token_ids[-1]

    def _take(self, text: str) -> str | None:
        """Adds text to what is held; at the end of a stop string cuts it as the client asked and returns the string."""
        before = self._held
        for end, char in enumerate(text, start=1):
            if match_len := self._stops.advance(char):
                self._held = before + text[:end]
                stop = self._cut(match_len)
                if stop is not None:
                    return stop
        self._held = before + text
        return None

    def _cut(self, match_len: int) -> str | None:
        """Ends what is held at a stop string that was found, if it counts; 0 is none."""
        if not match_len or self._num_tokens < self._min_new_tokens:
            return None
        answer = self._held[: len(self._held) - self._stops.behind_len]
        self._held = answer if self._no_stop_trim else answer[:-match_len]
        return answer[-match_len:]

    def _release(self) -> str:
        """Takes out of what is held all that is decided."""
        held_len = 0 if self._is_finished else self._stops.held_len
        cut = len(self._held) - held_len
        released, self._held = self._held[:cut], self._held[cut:]
        return released
