"""Prompts → requests, and a request's outputs → the answer that its client sees.

`jsg.Engine` and every HTTP endpoint use it.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any, final

from jsg.cache_report import CacheReport
from jsg.errors import RequestError
from jsg.processing.growing_text import GrowingText
from jsg.processing.stop_strings import MakeFinder
from jsg.processing.tokenizer import Tokenizer
from jsg.prompt_ids import PromptIds
from jsg.speech.answers.answer_stream import AnswerDelta, AnswerStream, ScoreStream
from jsg.speech.answers.parts_reader import CallForm
from jsg.speech.answers.thoughts import Thoughts
from jsg.speech.answers.tool_calls import GrowingAnswer, ParsedAnswer
from jsg.step_reports import ConstraintReport, DraftReport, Source
from jsg.token_scores import GrowingScores
from jsg.types import (
    Embedder,
    FinishReason,
    Request,
    RequestFields,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
    altered,
    expand_answers,
    namespace_digest,
)
from jsg.waits import Waited, by_name, sum_of

_LEAST_COMMON = 32  # tokens; to keep a state for fewer costs more than to compute them
PROMPT_TAIL_LEN = 8  # tokens that can begin a character which the answer completes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt(RequestFields):
    """The tokens to continue, and what to report of the answers.

    Attributes:
        rid: Name of its request. With n > 1 each answer has a number after it.
        input_ids: The tokens.
        is_continued: The answer continues the prompt's text, so its leading space is kept. False after a chat template,
            where the answer is a text of its own.
        calls: How the answer writes calls of tools, if it may have any. Stop strings do not end it inside a call.
        only_scores_next: The answer has no token, but reports the log-probabilities of alternatives for its first.
            `sampling.max_new_tokens` is 1.
        embed: The answer is a vector. `only_scores_next` is set too.
        ends_in_content: Nothing but white space follows the words of a client that the prompt ends with, so a
            marker of thoughts there is text.
        thoughts: How thoughts are split from the answer; None where they stay in its text.
    """

    rid: str
    input_ids: tuple[int, ...] | PromptIds
    sampling: SamplingParams
    is_continued: bool = True
    calls: CallForm | None = None
    only_scores_next: bool = False
    embed: bool = False
    ends_in_content: bool = False
    thoughts: Thoughts | None = None

    def check_task(self, embedder: Embedder | None) -> None:
        """Raises RequestError where the model generates and the prompt wants a vector, or the other way round."""
        if self.embed != (embedder is not None):
            does = "generates text and embeds none" if self.embed else "embeds texts and generates none"
            raise RequestError(f"the model here {does}; use another endpoint or another server (--task)", "model")

    @property
    def num_scores(self) -> int:
        """The most log-probabilities that its answers report, over all positions and alternatives."""
        if not self.return_logprob:
            return 0
        scored_prompt_len = max(0, len(self.input_ids) - self.logprob_start_len) if self.logprob_start_len >= 0 else 0
        per_position = 1 + self.top_logprobs_num + len(self.token_ids_logprob)
        return (scored_prompt_len + self.sampling.max_new_tokens) * per_position * self.sampling.n

    def requests(self, fresh_seed: int, vocab_size: int | None = None) -> list[Request]:
        """One request for each of the `n` answers.

        Args:
            fresh_seed: The seed if the prompt names none.
            vocab_size: Stop tokens and biases of ids from this number on are left out, because no token has such an id.

        Raises:
            RequestError: A field breaks a rule.
        """
        samplings = expand_answers(_within(self.sampling, vocab_size), fresh_seed)
        first = Request(rid=self.rid, sampling=samplings[0], **{name: getattr(self, name) for name in _OF_REQUEST})
        if (points := _branch_points(first, len(samplings))) != first.snapshot_at:
            first = altered(first, snapshot_at=points)
        if len(samplings) == 1:
            return [first]
        return [altered(first, rid=f"{self.rid}_{index}", sampling=each) for index, each in enumerate(samplings)]

    def answers(
        self, tokenizer: Tokenizer, fresh_seed: int, vocab_size: int, patterns: MakeFinder | None
    ) -> "list[Answer]":
        """An answer that has not begun for each of `requests`. `patterns` as in `Answer`; raises as `requests`."""
        return [
            Answer(
                request,
                tokenizer,
                is_continued=self.is_continued,
                calls=self.calls,
                only_scores_next=self.only_scores_next,
                thoughts=self.thoughts,
                patterns=patterns,
            )
            for request in self.requests(fresh_seed, vocab_size)
        ]


_OF_REQUEST = ("input_ids", *(field.name for field in dataclasses.fields(RequestFields)))
"""The fields that the requests for all answers to a prompt have in common."""


def _branch_points(request: Request, num_answers: int) -> tuple[int, ...]:
    """Its `snapshot_at`, and where it parts from other requests that are likely to come with it or after it.

    Several answers go on from the prompt's end, and so does what follows a request that only fills the cache. Scored
    prompts have in common what comes before the token that the first scored one is predicted from.
    """
    points = set(request.snapshot_at)
    if request.wants_prompt_logprobs:
        points.add(request.logprob_start_len - 1)
    elif num_answers > 1 or not (request.sampling.max_new_tokens or request.hold):
        points.add(len(request.input_ids))
    return tuple(sorted(point for point in points if point > 0))


def with_common_point(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """Prompts that come together, each with a point in its `snapshot_at` where they part, if they share a prefix."""
    if len(prompts) < 2 or len({prompt.namespace for prompt in prompts}) > 1:
        return prompts
    all_ids = [PromptIds.of(prompt.input_ids) for prompt in prompts]
    scored = [prompt.logprob_start_len - 1 for prompt in prompts if prompt.logprob_start_len >= 0]
    pairs = [pair for prompt in prompts for pair in zip(prompt.media, prompts[0].media, strict=False)]
    others = [item.start for item, first in pairs if item.digest != first.digest]  # their placeholders are alike
    length = max(0, min(*map(len, all_ids), *scored, *others))
    for ids in all_ids[1:]:
        differs = ids.array[:length] != all_ids[0].array[:length]
        length = int(differs.argmax()) if differs.any() else length
    if length < _LEAST_COMMON:
        return prompts
    return [
        dataclasses.replace(prompt, input_ids=ids, snapshot_at=tuple(sorted({*prompt.snapshot_at, length})))
        for prompt, ids in zip(prompts, all_ids, strict=True)
    ]


def asked(
    sampling: SamplingParams,
    room: int,
    *,
    return_logprob: bool,
    logprob_start_len: int,
    top_logprobs_num: int,
    token_ids_logprob: Sequence[int],
) -> dict[str, Any]:
    """The fields of a `Prompt` that say what to sample and to report.

    Without `return_logprob` the other reports ask for nothing, because clients of SGLang send them always. Without new
    tokens, alternatives for the next one take a token of their own, for which the prompt must leave `room`.
    """
    if not return_logprob:
        return {"sampling": sampling}
    scores_next = not sampling.max_new_tokens and room > 0 and bool(top_logprobs_num or token_ids_logprob)
    return {
        "sampling": dataclasses.replace(sampling, max_new_tokens=1) if scores_next else sampling,
        "only_scores_next": scores_next,
        "return_logprob": True,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "token_ids_logprob": tuple(token_ids_logprob),
    }


def _within(sampling: SamplingParams, vocab_size: int | None) -> SamplingParams:
    """The parameters without ids that are outside the vocabulary."""
    named = (*sampling.stop_token_ids, *(token for token, _ in sampling.logit_bias))
    if vocab_size is None or not named or max(named) < vocab_size:
        return sampling
    return dataclasses.replace(
        sampling,
        stop_token_ids=tuple(token for token in sampling.stop_token_ids if token < vocab_size),
        logit_bias=tuple(pair for pair in sampling.logit_bias if pair[0] < vocab_size),
    )


@dataclasses.dataclass(slots=True)
class _Constraint:
    """What the grammar has done to an answer so far; see `types.ConstraintReport`."""

    is_forced: list[bool] = dataclasses.field(default_factory=list)
    kept_mass: list[float] = dataclasses.field(default_factory=list)
    is_complete: bool = False

    def add(self, report: ConstraintReport, num_tokens: int) -> None:
        """Adds the report of one output, of which the answer has the first `num_tokens` tokens."""
        if num_tokens:
            self.is_forced += report.is_forced[:num_tokens]
            self.kept_mass += report.kept_mass[:num_tokens]
            self.is_complete = report.is_complete and num_tokens == len(report.kept_mass)  # else it was cut


@dataclasses.dataclass(slots=True)
class _Drafts:
    """How many draft tokens an answer had, and how many tokens came for it. A text may end it within a step."""

    report: DraftReport = dataclasses.field(default_factory=DraftReport)
    num_received: int = 0


@dataclasses.dataclass(slots=True)
class _Times:
    """When things happened, in seconds since the request was made."""

    started_at: float = dataclasses.field(default_factory=time.monotonic)
    queue_s: float = 0.0
    first_token_s: float | None = None
    elapsed_s: float = 0.0


class _Texts:
    """What the tokens of an answer say: its text, its thoughts, and the texts and calls if it may have calls."""

    __slots__ = ("parsed", "text", "thoughts")

    def __init__(self, *, has_calls: bool) -> None:
        self.text = GrowingText()
        self.thoughts = GrowingText()
        self.parsed = GrowingAnswer() if has_calls else None

    def add(self, delta: AnswerDelta) -> None:
        self.text.append(delta.text)
        if delta.thoughts:
            self.thoughts.append(delta.thoughts)
        if self.parsed is not None:
            self.parsed.add(delta.parts)


@final
class Answer:
    """One answer as far as it has come. Times are in seconds since the request was made.

    Attributes:
        scores: The log-probabilities of its own tokens; `logprobs` has those of its thoughts too.
        vector: As in `RequestOutput`.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        *,
        is_continued: bool = True,
        calls: CallForm | None = None,
        only_scores_next: bool = False,
        thoughts: Thoughts | None = None,
        patterns: MakeFinder | None = None,
    ) -> None:
        """An answer that has not begun.

        Args:
            request: The request that is answered.
            tokenizer: The model's.
            is_continued: As in `Prompt`.
            calls: As in `Prompt`.
            only_scores_next: As in `Prompt`.
            thoughts: As in `Prompt`.
            patterns: Makes the finder of its stop patterns; `constrained.stop_patterns.stop_patterns` gives it.
        """
        tail = request.input_ids[-PROMPT_TAIL_LEN:] if is_continued else ()
        self.request = request
        self.token_ids: list[int] = []
        self.logprobs = GrowingScores()
        self.scores = self.logprobs if thoughts is None else GrowingScores()
        self.prompt_logprobs: Sequence[TokenLogprob] = ()
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.cache_report: CacheReport | None = None
        self.waited: Waited | None = None
        self.vector: bytes | None = None
        self._drafts = _Drafts()
        self._texts = _Texts(has_calls=calls is not None)
        self._constraint = _Constraint()
        self._times = _Times()
        self._stream = (
            ScoreStream()
            if only_scores_next
            else AnswerStream(
                tokenizer,
                request.sampling,
                prompt_tail_ids=tail,
                patterns=patterns,
                thoughts=thoughts,
                calls=calls,
                is_scored=request.return_logprob,
            )
        )

    @property
    def text(self) -> str:
        """Its text so far. To read it joins what came since the last reading: read the deltas of what grows."""
        return str(self._texts.text)

    @property
    def thoughts(self) -> str:
        """The thoughts before it, where they are split from its text. To read them costs as much as `text`."""
        return str(self._texts.thoughts)

    @property
    def parsed(self) -> ParsedAnswer:
        """Its text and calls so far. To read them costs as much as `text`."""
        parsed = self._texts.parsed
        return ParsedAnswer(self.text, ()) if parsed is None else parsed.whole(is_cut=self.is_call_cut)

    @property
    def has_calls(self) -> bool:
        """Whether it has calls so far."""
        return self._stream.parts is not None and self._stream.parts.has_calls

    @property
    def is_call_cut(self) -> bool:
        """Whether it ends inside a call so far."""
        return self._stream.parts is not None and self._stream.parts.is_cut

    @property
    def ends_in_engine(self) -> bool:
        """Whether only the engine ends it.

        An answer that may end by its text, which the engine does not see, must be read as it grows, so that it ends in
        time.
        """
        return not self._stream.can_stop

    @property
    def num_thought_tokens(self) -> int:
        """The tokens of its thoughts so far, without their markers."""
        return self._stream.num_thought_tokens[0]

    @property
    def num_tokens_before(self) -> int:
        """The tokens before the answer itself, those of thoughts with their markers. SGLang counts thoughts so."""
        return self._stream.num_thought_tokens[1]

    @property
    def queue_s(self) -> float:
        """How long the engine let it wait for its first step."""
        return self._times.queue_s

    @property
    def first_token_s(self) -> float | None:
        """When its first token came; None before that."""
        return self._times.first_token_s

    @property
    def elapsed_s(self) -> float:
        """When its last output came."""
        return self._times.elapsed_s

    def push(self, output: RequestOutput) -> AnswerDelta:
        """Takes the engine's next output. After the finish nothing changes any more."""
        delta = self._stream.push(output.token_ids, output.finish, output.logprobs)
        self._texts.add(delta)
        times = self._times
        times.elapsed_s = time.monotonic() - times.started_at
        if delta.token_ids:
            self.token_ids += delta.token_ids
            if times.first_token_s is None:
                times.first_token_s = times.elapsed_s
        if delta.logprobs or delta.scores:
            self.logprobs += delta.logprobs
            if self.scores is not self.logprobs:
                self.scores += delta.scores
        if output.cached_tokens > self.cached_tokens:
            self.cached_tokens = output.cached_tokens
        if output.queue_s > times.queue_s:
            times.queue_s = output.queue_s
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cache_report = output.cache_report or self.cache_report
        if output.waited is not None:
            self.waited = sum_of((self.waited, output.waited))
        self.vector = output.vector or self.vector
        self._drafts.report = output.drafts or self._drafts.report
        self._drafts.num_received += len(output.token_ids)
        if output.constraint is not None:
            self._constraint.add(output.constraint, len(delta.token_ids))
        self.finish = self.finish or delta.finish
        return delta

    def result(
        self,
        texts: Tokenizer | None = None,
        *,
        with_prompt_logprobs: bool = True,
        with_logprobs: bool = True,
        delta: AnswerDelta | None = None,
    ) -> dict[str, Any]:
        """The answer so far, as SGLang's `/generate` shows it.

        Args:
            texts: The tokenizer that gives the text of each token of a logprob; None for no texts.
            with_prompt_logprobs: False leaves the `input_*` logprobs out; `shown_prompt_logprobs` gives them.
            with_logprobs: False leaves the `output_*` logprobs out; `shown_logprobs` gives them.
            delta: Shows only the text and the tokens of this delta, and what the grammar did only at the end.
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
        if self.request.return_waited:
            meta["waited"] = by_name(self.waited)
        if self.request.sampling.return_drafts and self.finish is not None:
            meta["drafts"] = self.drafts()
        if self.request.sampling.return_constraint and (delta is None or self.finish is not None):
            meta["constraint"] = self.constraint()
        if self.request.return_logprob:
            if with_prompt_logprobs:
                meta |= self.shown_prompt_logprobs(texts)
            if with_logprobs:
                meta |= self.shown_logprobs(texts)
        text, token_ids = (self.text, self.token_ids) if delta is None else (delta.text, delta.token_ids)
        return {"text": text, "output_ids": list(token_ids), "meta_info": meta}

    def constraint(self) -> dict[str, Any]:
        """What the grammar has done so far: which tokens it forced, the mass kept, whether it is complete.

        `kept_mass` is the probability that the model gave to the allowed tokens. Near 1 the grammar changed nothing;
        near 0 the model wanted something else.
        """
        report, num_tokens = self._constraint, len(self.token_ids)
        return {
            "forced_share": sum(report.is_forced) / num_tokens if num_tokens else 0.0,
            "is_forced": list(report.is_forced),
            "kept_mass": list(report.kept_mass),
            "is_complete": report.is_complete,
        }

    def drafts(self) -> dict[str, Any]:
        """How many draft tokens it had, by source, and in how many steps its tokens came."""
        proposed, taken = self._drafts.report.proposed, self._drafts.report.taken
        return {"proposed": proposed, "taken": taken, "steps": self._drafts.num_received - sum(taken.values())}

    @property
    def predicted(self) -> tuple[int, int]:
        """How many drafts from the client's prediction became tokens of it, and how many did not."""
        report, name = self._drafts.report, Source.PREDICTION.label
        taken = report.taken.get(name, 0)
        return taken, report.proposed.get(name, 0) - taken

    def shown_prompt_logprobs(
        self, texts: Tokenizer | None, start: int = 0, stop: int | None = None
    ) -> dict[str, list[Any]]:
        """The `input_*` logprobs from `start` to `stop`, by their names in `meta_info`."""
        return self._shown_logprobs("input", self.prompt_logprobs[start:stop], texts)

    def shown_logprobs(self, texts: Tokenizer | None, start: int = 0, stop: int | None = None) -> dict[str, list[Any]]:
        """The `output_*` logprobs from `start` to `stop`, by their names in `meta_info`."""
        # A `ScoreStream` has the scores of a token that it does not show.
        num_named = max(0, len(self.token_ids) - start)
        return self._shown_logprobs("output", self.logprobs[start:stop], texts, num_named)

    def _shown_logprobs(
        self, side: str, scored: Sequence[TokenLogprob], texts: Tokenizer | None, num_named: int | None = None
    ) -> dict[str, list[Any]]:
        def text_of(token_id: int) -> str | None:
            return None if texts is None else texts.token_bytes(token_id).decode(errors="replace")

        def entries(pairs: Iterable[tuple[int, float | None]]) -> list[list[Any]]:
            return [[logprob, token_id, text_of(token_id)] for token_id, logprob in pairs]

        own = entries((token.token_id, token.logprob) for token in scored[:num_named])
        shown: dict[str, list[Any]] = {f"{side}_token_logprobs": own}
        if self.request.top_logprobs_num:
            shown[f"{side}_top_logprobs"] = [entries(token.top) or None for token in scored]
        if self.request.token_ids_logprob:
            shown[f"{side}_token_ids_logprobs"] = [entries(token.chosen) or None for token in scored]
        return shown


def _shown_cache(report: CacheReport, request: Request) -> dict[str, Any]:
    """Why the cached prefix ended where it did, in words of a client, and without secrets of the namespace."""
    position = report.first_difference
    return {
        "why": None if report.why is None else report.why.value,
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
        "evicted_for": None if report.evicted_for is None else report.evicted_for.value,
        "evicted_for_own": report.evicted_for_own,
        "unusable_tokens": report.unusable_tokens,
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
