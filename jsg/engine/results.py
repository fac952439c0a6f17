"""From a step's arrays on the device to what the scheduler commits."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jsg.engine.sampling import Logprobs
from jsg.engine.step import StepOutput
from jsg.sched.records import Batch, BatchEntry
from jsg.sched.scheduler import StepResult
from jsg.types import TokenLogprob


@dataclasses.dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was dispatched and not read yet."""

    batch: Batch
    output: StepOutput
    prompt_scores: Logprobs | None

    def read(self) -> StepResult:
        """Waits for the step and takes its results to the host."""
        tokens = np.asarray(self.output.tokens).tolist()
        result = StepResult(tokens)
        if self.output.logprobs is not None:
            logprobs = jax.device_get(self.output.logprobs)
            for index, entry in enumerate(self.batch.entries):
                if entry.samples and entry.running.request.return_logprob and tokens[index] >= 0:
                    result.logprobs[index] = _token_logprob(entry, tokens[index], logprobs, index)
        if self.prompt_scores is not None:
            self._read_prompt(result, jax.device_get(self.prompt_scores))
        return result

    def _read_prompt(self, result: StepResult, scores: Logprobs) -> None:
        offset = 0
        for index, entry in enumerate(self.batch.entries):
            if entry.scores_prompt:
                result.prompt_logprobs[index] = list(_prompt_part(entry, scores, offset))
            offset += entry.num_new


def _prompt_part(entry: BatchEntry, scores: Logprobs, offset: int) -> Sequence[TokenLogprob]:
    """Scores of the prompt tokens that a chunk predicts, and of the first prompt token, which nothing does."""
    running = entry.running
    first_wanted = running.request.logprob_start_len
    part = [TokenLogprob(int(running.tokens[0]), None)] if entry.start == 0 and first_wanted == 0 else []
    for i in range(entry.num_new):
        position = entry.start + i + 1
        if max(first_wanted, 1) <= position < running.num_prompt:
            part.append(_token_logprob(entry, int(running.tokens[position]), scores, offset + i))
    return part


def _token_logprob(entry: BatchEntry, token: int, scores: Logprobs, index: int) -> TokenLogprob:
    request = entry.running.request
    count = request.top_logprobs_num
    top = zip(scores.top_ids[index, :count].tolist(), scores.top[index, :count].tolist(), strict=True)
    ids = request.token_ids_logprob
    chosen = zip(ids, scores.chosen[index, : len(ids)].tolist(), strict=True)
    return TokenLogprob(token, float(scores.token[index]), tuple(top), tuple(chosen))
