"""Compares two answers of one request, which may differ at near-ties: two shapes differ in the last bits."""

import math

import jax.numpy as jnp
import numpy as np

from jsg.engine.device.noise import gumbel
from jsg.types import Request, TokenLogprob
from tests.engine import small

MARGIN = 2e-4
LOGPROB_ERROR = 1e-4


def differs_at_a_tie(request: Request, got: small.Outcome, expected: small.Outcome) -> bool:
    """Asserts that both agree up to a position where the reference itself was close to another token."""
    assert_close(got.prompt_logprobs or (), expected.prompt_logprobs or ())
    for i, (mine, theirs) in enumerate(zip(got.token_ids, expected.token_ids, strict=False)):
        if mine != theirs:
            assert margin(request, expected, i) < MARGIN, f"token {i} of {request.rid} differs without a tie"
            return True
        assert_close(got.logprobs[i : i + 1], expected.logprobs[i : i + 1])
    assert len(got.token_ids) == len(expected.token_ids) and got.finish == expected.finish
    return False


def assert_close(got: tuple[TokenLogprob, ...] | list, expected: tuple[TokenLogprob, ...] | list) -> None:
    assert len(got) == len(expected)
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.token_id == theirs.token_id
        if mine.logprob is None or theirs.logprob is None:
            assert mine.logprob is theirs.logprob
            continue
        assert abs(mine.logprob - theirs.logprob) <= LOGPROB_ERROR
        top = dict(theirs.top)
        assert all(abs(value - top[token]) <= LOGPROB_ERROR for token, value in mine.top if math.isfinite(value))


def margin(request: Request, outcome: small.Outcome, index: int) -> float:
    """Distance of the two best perturbed scores; penalties and nucleus edges count as ties where they apply."""
    sampling = request.sampling
    if sampling.frequency_penalty or sampling.repetition_penalty != 1 or sampling.min_new_tokens:
        return 0.0
    scores = np.full(small.VOCAB, -np.inf)
    for token, value in outcome.logprobs[index].top:
        scores[token] = value
    if sampling.temperature:
        if sampling.top_p < 1 or sampling.top_k > 0:
            return 0.0
        seed = sampling.sampling_seed or 0
        seeds = jnp.array([[seed & 0xFFFFFFFF, seed >> 32]], jnp.uint32)
        noise = np.asarray(gumbel(seeds, jnp.array([index]), small.VOCAB))[0]
        scores = scores / sampling.temperature + noise
    best = np.sort(scores)[-2:]
    return float(best[1] - best[0])
