"""Adds output tokens to their request, checks whether it ends, and makes the record that leaves the engine."""

import dataclasses
from collections.abc import Set

from jsg.sched.batch import StepResult
from jsg.sched.request import FirstAdmission, RunningRequest
from jsg.step_reports import ConstraintReport
from jsg.token_scores import TokenScores
from jsg.types import FinishReason, FinishType, RequestOutput, TokenLogprob


def make_output(
    running: RunningRequest,
    token_ids: tuple[int, ...] = (),
    logprobs: tuple[TokenLogprob, ...] = (),
    finish: FinishReason | None = None,
    constraint: ConstraintReport | None = None,
    vector: bytes | None = None,
) -> RequestOutput:
    """Makes the record of what is new of a request.

    The first output, which may be the end, has the prompt logprobs, unless the request ends before all are there.
    """
    has_reported, running.has_reported = running.has_reported, True
    admission, prompt_logprobs = running.admission or FirstAdmission(), None
    if running.request.wants_prompt_logprobs and not has_reported:
        scores, running.prompt_logprobs = running.prompt_logprobs, TokenScores()
        prompt_logprobs = scores if len(scores) == running.num_prompt - running.request.logprob_start_len else None
    if admission.waited is not None:
        running.admission = dataclasses.replace(admission, waited=None)
    return RequestOutput(
        rid=running.request.rid,
        token_ids=token_ids,
        finish=finish,
        prompt_tokens=running.num_prompt,
        cached_tokens=admission.cached_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        queue_s=admission.queue_s,
        waited=admission.waited,
        cache_report=None if has_reported else admission.report,
        constraint=constraint,
        vector=vector,
    )


def append_tokens(
    running: RunningRequest, tokens: list[int], index: int, row: int, result: StepResult, eos_token_ids: Set[int]
) -> RequestOutput:
    """Adds output tokens to their request, up to the first that ends it, and returns the record of what is new.

    Args:
        running: The request.
        tokens: The tokens that a step sampled for it, at least one.
        index: The index of its entry in the batch.
        row: The first row of logits of that entry.
        result: The results of the step.
        eos_token_ids: Tokens that end an answer.
    """
    reason, count = None, 0
    for token in tokens:
        running.append(token)
        count += 1
        reason = stop_reason(running, token, eos_token_ids)
        if reason is None and result.ended.get(index) == count:
            reason = FinishReason(FinishType.STOP)
        if reason is not None:
            break
    scores = result.logprobs
    logprobs = tuple(scores[i] for i in range(row, row + count) if i in scores) if scores else ()
    reports = result.constraints.get(index)
    constraint = reports[count - 1] if reports else None
    return make_output(running, tuple(tokens[:count]), logprobs, reason, constraint, result.vectors.get(index))


def stop_reason(running: RunningRequest, token: int, eos_token_ids: Set[int]) -> FinishReason | None:
    """Why a request ends with the output token that was just added to it; None if it continues."""
    sampling, num_output = running.request.sampling, running.num_output
    if num_output >= sampling.min_new_tokens:
        is_eos = token in eos_token_ids and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            return FinishReason(FinishType.STOP, matched=token)
    if num_output >= sampling.max_new_tokens:
        return FinishReason(FinishType.LENGTH)
    return None
