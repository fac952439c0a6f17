"""From prompts to requests, and from a request's outputs to the answer its client sees.

Shared by everything that serves a client: `jsg.Engine` in process, and every HTTP endpoint.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, final

from jsg.media import MediaInput
from jsg.processing.call_stops import CallForm, CallStops
from jsg.processing.output import OutputStream
from jsg.processing.stop_strings import MakeFinder, find_stops
from jsg.processing.tokenizer import Tokenizer
from jsg.types import (
    CacheReport,
    ConstraintReport,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    expand_answers,
    namespace_digest,
)

PROMPT_TAIL_LEN = 8  # tokens that can begin a character which the answer completes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What to continue, and what to report of it.

    Attributes:
        rid: Name of its request; answers of n > 1 get a number behind it.
        input_ids: The tokens.
        is_continued: The answer goes on in the prompt's text, so that a leading space is kept; false after a chat
            template, where the answer is a text of its own.
        calls: How calls of tools stand in the answer, where it may have some: stop strings do not end it in one.
        return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob, namespace, priority,
            return_cache_info, hold, position_jumps, joined, media: As in `Request`.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    is_continued: bool = True
    calls: CallForm | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()
    namespace: str = ""
    priority: int = 0
    return_cache_info: bool = False
    hold: bool = False
    position_jumps: tuple[tuple[int, int], ...] = ()
    joined: tuple[int, ...] = ()
    media: tuple[MediaInput, ...] = ()

    @property
    def num_scores(self) -> int:
        """Log-probabilities that its answers report at most, all positions and alternatives counted."""
        if not self.return_logprob:
            return 0
        scored_prompt_len = max(0, len(self.input_ids) - self.logprob_start_len) if self.logprob_start_len >= 0 else 0
        per_position = 1 + self.top_logprobs_num + len(self.token_ids_logprob)
        return (scored_prompt_len + self.sampling.max_new_tokens) * per_position * self.sampling.n

    def requests(self, fresh_seed: int) -> list[Request]:
        """One request for each of the `n` answers.

        Args:
            fresh_seed: Used where the prompt names no seed.

        Raises:
            RequestError: A field breaks a rule.
        """
        samplings = expand_answers(self.sampling, fresh_seed)
        return [
            Request(
                rid=self.rid if len(samplings) == 1 else f"{self.rid}_{index}",
                input_ids=self.input_ids,
                sampling=sampling,
                return_logprob=self.return_logprob,
                logprob_start_len=self.logprob_start_len,
                top_logprobs_num=self.top_logprobs_num,
                token_ids_logprob=self.token_ids_logprob,
                namespace=self.namespace,
                priority=self.priority,
                return_cache_info=self.return_cache_info,
                hold=self.hold,
                position_jumps=self.position_jumps,
                joined=self.joined,
                media=self.media,
            )
            for index, sampling in enumerate(samplings)
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """What one output, or several in a row, added to one answer.

    Attributes:
        text: New text.
        token_ids: New tokens, up to the one that completed a stop string.
        logprobs: One per new token when asked for.
        finish: Set in the last delta. If the output had none, the text ended at a stop string, and the caller aborts
            the request in the engine.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None

    @staticmethod
    def join(deltas: Sequence["AnswerDelta"]) -> "AnswerDelta":
        """One delta in place of several that follow one another."""
        if len(deltas) == 1:
            return deltas[0]
        return AnswerDelta(
            text="".join(delta.text for delta in deltas),
            token_ids=tuple(itertools.chain.from_iterable(delta.token_ids for delta in deltas)),
            logprobs=tuple(itertools.chain.from_iterable(delta.logprobs for delta in deltas)),
            finish=deltas[-1].finish,
        )


@dataclasses.dataclass(slots=True)
class _Constraint:
    """What the grammar did to an answer so far; see `types.ConstraintReport`."""

    num_forced: int = 0
    kept_mass: list[float] = dataclasses.field(default_factory=list)
    is_complete: bool = False

    def add(self, report: ConstraintReport, num_tokens: int) -> None:
        """Takes what one output says, of which the answer has the first `num_tokens` tokens."""
        if num_tokens:
            self.num_forced += min(report.num_forced, num_tokens)
            self.kept_mass += report.kept_mass[:num_tokens]
            self.is_complete = report.is_complete and num_tokens == len(report.kept_mass)  # else it was cut

    def shown(self, num_tokens: int) -> dict[str, Any]:
        """In words of a client."""
        return {
            "forced_share": self.num_forced / num_tokens if num_tokens else 0.0,
            "kept_mass": list(self.kept_mass),
            "is_complete": self.is_complete,
        }


@final
class Answer:
    """One answer as far as it has come. Times are in seconds since the request was made.

    Attributes:
        ends_in_engine: Only the engine ends it. What may end in its text, which the engine does not see, has to be read
            as it grows, so that it ends in time.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        is_continued: bool = True,
        calls: CallForm | None = None,
        patterns: MakeFinder | None = None,
    ) -> None:
        """An answer that has not begun.

        Args:
            request: What is answered.
            tokenizer: Of the model.
            is_continued: As in `Prompt`.
            calls: As in `Prompt`.
            patterns: Makes what finds its stop patterns: `constrained.stop_patterns.stop_patterns(request.sampling)`.
        """
        assert patterns is not None or not request.sampling.stop_regex, "constrained/stop_patterns makes the finder"
        tail = request.input_ids[-PROMPT_TAIL_LEN:] if is_continued else ()
        stop = request.sampling.stop
        stops = find_stops(stop, patterns) if calls is None else CallStops(stop, calls, patterns)
        self.request = request
        self.ends_in_engine = not (stop or patterns or calls)
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.cache_report: CacheReport | None = None
        self._constraint = _Constraint()
        self.queue_s = 0.0
        self.first_token_s: float | None = None
        self.elapsed_s = 0.0
        self._stream = OutputStream(tokenizer, request.sampling, prompt_tail_ids=tail, stops=stops)
        self._started = time.monotonic()

    def push(self, output: RequestOutput) -> AnswerDelta:
        """Takes what the engine gave next; after the finish nothing changes any more."""
        part = self._stream.push(output.token_ids, output.finish)
        self.text += part.text
        self.token_ids += part.token_ids
        delta = AnswerDelta(
            text=part.text,
            token_ids=part.token_ids,
            logprobs=output.logprobs[: len(part.token_ids)],
            finish=part.finish,
        )
        self.elapsed_s = time.monotonic() - self._started
        if self.first_token_s is None and delta.token_ids:
            self.first_token_s = self.elapsed_s
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.queue_s = max(self.queue_s, output.queue_s)
        self.logprobs += delta.logprobs
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cache_report = output.cache_report or self.cache_report
        if output.constraint is not None:
            self._constraint.add(output.constraint, len(delta.token_ids))
        self.finish = self.finish or delta.finish
        return delta

    def result(self, texts: Tokenizer | None = None, *, with_prompt_logprobs: bool = True) -> dict[str, Any]:
        """The answer so far as SGLang's `/generate` shows it.

        Args:
            texts: With it logprobs carry the text of their tokens.
            with_prompt_logprobs: Without it the `input_*` logprobs are left out.
        """
        meta: dict[str, Any] = {
            "id": self.request.rid,
            "finish_reason": _finish_reason(self.finish, len(self.token_ids)),
            "prompt_tokens": len(self.request.input_ids),
            "completion_tokens": len(self.token_ids),
            "cached_tokens": self.cached_tokens,
            "e2e_latency": self.elapsed_s,
            "time_to_first_token": self.first_token_s,
            "queue_time": self.queue_s,
        }
        if self.request.return_cache_info:
            meta["cache"] = None if self.cache_report is None else _shown_cache(self.cache_report, self.request)
        if self.request.sampling.return_constraint:
            meta["constraint"] = self.constraint()
        if self.request.return_logprob:
            if with_prompt_logprobs:
                meta |= self._shown_logprobs("input", self.prompt_logprobs, texts)
            meta |= self._shown_logprobs("output", self.logprobs, texts)
        return {"text": self.text, "output_ids": list(self.token_ids), "meta_info": meta}

    def constraint(self) -> dict[str, Any]:
        """What the grammar did so far: the share that jump-forward wrote, the mass kept, whether it is complete.

        `kept_mass` is the probability that the model gave to what the grammar allowed: near 1 the grammar changed
        nothing, near 0 the model wanted something else.
        """
        return self._constraint.shown(len(self.token_ids))

    def _shown_logprobs(self, side: str, scored: Sequence[TokenLogprob], texts: Tokenizer | None) -> dict[str, Any]:
        def text_of(token_id: int) -> str | None:
            return None if texts is None else texts.token_bytes(token_id).decode(errors="replace")

        def entries(pairs: Iterable[tuple[int, float | None]]) -> list[list[Any]]:
            return [[logprob, token_id, text_of(token_id)] for token_id, logprob in pairs]

        shown: dict[str, Any] = {f"{side}_token_logprobs": entries((token.token_id, token.logprob) for token in scored)}
        if self.request.top_logprobs_num:
            shown[f"{side}_top_logprobs"] = [entries(token.top) or None for token in scored]
        if self.request.token_ids_logprob:
            shown[f"{side}_token_ids_logprobs"] = [entries(token.chosen) or None for token in scored]
        return shown


def _shown_cache(report: CacheReport, request: Request) -> dict[str, Any]:
    """Why the cached prefix ended where it did, in words of a client: its tokens, and no secret of its own."""
    position = report.first_difference
    return {
        "matched_tokens": report.matched_tokens,
        "matchable_tokens": report.matchable_tokens,
        "first_difference": None
        if position is None
        else {
            "position": position,
            "token_id": request.input_ids[position],
            "cached_token_ids": list(report.cached_continuations),
        },
        "evicted_at": report.evicted_at,
        "evicted_tokens": report.evicted_tokens,
        "namespace": namespace_digest(request.namespace),
    }


def _finish_reason(finish: FinishReason | None, num_tokens: int) -> dict[str, Any] | None:
    if finish is None:
        return None
    reason: dict[str, Any] = {"type": finish.type.value}
    if finish.matched is not None:
        reason["matched"] = finish.matched
    if finish.type == "length":
        reason["length"] = num_tokens
    if finish.message is not None:
        reason["message"] = finish.message
    return reason
