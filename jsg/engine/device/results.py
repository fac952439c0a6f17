"""Reads a step's arrays from the device into the result that the scheduler commits."""

import dataclasses
import logging

import jax
import numpy as np

from jsg.engine.device.sampling import Logprobs
from jsg.engine.device.step import StepOutput
from jsg.sched.batch import Batch, BatchEntry, StepResult
from jsg.sched.request import RunningRequest
from jsg.token_scores import ScorePart
from jsg.types import TokenLogprob

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was dispatched but not read yet.

    Attributes:
        batch: The step.
        output: Tokens, with their log-probabilities if a request wants them.
        prompt_scores: Log-probabilities of prompt tokens if a request wants them.
        failed: Requests that could not be set up for the step; their results mean nothing.
        vectors: Hidden states of each request's last new token; None where the model does not embed.
    """

    batch: Batch
    output: StepOutput
    prompt_scores: Logprobs | None
    failed: tuple[RunningRequest, ...] = ()
    vectors: jax.Array | None = None

    def read(self) -> StepResult:
        """Waits for the step and copies its results to the host.

        An error in the results of one request fails that request only. An error of the device is raised.
        """
        result = StepResult(np.asarray(self.output.tokens).tolist(), failed=list(self.failed))
        if self.vectors is not None:
            vectors = np.asarray(self.vectors)
            for index, entry in enumerate(self.batch.entries):
                if entry.samples:
                    result.vectors[index] = vectors[index].tobytes()
        if self.output.logprobs is None and self.prompt_scores is None:
            return result
        logprobs, prompt_scores = jax.device_get((self.output.logprobs, self.prompt_scores))
        if self.output.kept_mass is not None:
            result.kept_mass.update(enumerate(np.asarray(self.output.kept_mass).tolist()))
        offset = 0
        for index, (entry, row) in enumerate(zip(self.batch.entries, self.batch.first_rows, strict=True)):
            try:
                if logprobs is not None and entry.samples and entry.running.request.return_logprob:
                    for sampled in range(row, row + entry.num_rows):
                        if (token := result.token_ids[sampled]) >= 0:
                            result.logprobs[sampled] = _token_logprob(entry, token, logprobs, sampled)
                if prompt_scores is not None and entry.scores_prompt:
                    result.prompt_logprobs[index] = _prompt_parts(entry, prompt_scores, offset)
            except Exception:
                logger.exception("the log-probabilities of a request could not be read")
                result.failed.append(entry.running)
            offset += entry.num_new
        return result


def _prompt_parts(entry: BatchEntry, scores: Logprobs, offset: int) -> list[ScorePart]:
    """Scores of the prompt tokens that a chunk predicts, and of the first prompt token, which nothing predicts.

    The tokens of the chunk begin at `offset` of the packed tokens.
    """
    running, request = entry.running, entry.running.request
    first_wanted, parts = request.logprob_start_len, list[ScorePart]()
    if entry.start == 0 and first_wanted == 0:
        parts.append(ScorePart.first(int(running.tokens[0])))
    start = max(first_wanted, 1, entry.start + 1)
    stop = min(running.num_prompt, entry.start + entry.num_new + 1)
    if start < stop:
        rows = slice(offset + start - entry.start - 1, offset + stop - entry.start - 1)
        k, chosen = request.top_logprobs_num, request.token_ids_logprob
        top = scores.top_ids[rows, :k], scores.top[rows, :k]
        ids, logprobs = running.tokens[start:stop], scores.token[rows]
        parts.append(ScorePart.of(ids, logprobs, *top, chosen, scores.chosen[rows, : len(chosen)]))
    return parts


def _token_logprob(entry: BatchEntry, token: int, scores: Logprobs, index: int) -> TokenLogprob:
    request = entry.running.request
    count = request.top_logprobs_num
    top = zip(scores.top_ids[index, :count].tolist(), scores.top[index, :count].tolist(), strict=True)
    ids = request.token_ids_logprob
    chosen = zip(ids, scores.chosen[index, : len(ids)].tolist(), strict=True)
    return TokenLogprob(token, float(scores.token[index]), tuple(top), tuple(chosen))
