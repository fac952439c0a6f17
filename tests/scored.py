"""Scores of prompts as the engine has them, made of scores as objects."""

import itertools
from collections.abc import Iterable

import numpy as np

from jsg.token_scores import ScorePart, TokenLogprob, TokenScores


def scores_of(scored: Iterable[TokenLogprob]) -> TokenScores:
    """These scores. Log-probabilities should be of 32 bits."""
    return TokenScores([_part(list(some)) for _, some in itertools.groupby(scored, _shape)])


def _shape(score: TokenLogprob) -> tuple:
    return score.logprob is None, len(score.top), tuple(token for token, _ in score.chosen)


def _part(some: list[TokenLogprob]) -> ScorePart:
    if some[0].logprob is None:
        assert len(some) == 1 and not some[0].top and not some[0].chosen, "nothing is known of a first token"
        return ScorePart.first(some[0].token_id)
    top, chosen = (np.array([getattr(score, name) for score in some], float) for name in ("top", "chosen"))
    top, chosen = (pairs.reshape(len(some), -1, 2) for pairs in (top, chosen))
    return ScorePart.of(
        np.array([score.token_id for score in some], np.int32),
        np.array([score.logprob for score in some], np.float32),
        top[:, :, 0].astype(np.int32),
        top[:, :, 1].astype(np.float32),
        tuple(token for token, _ in some[0].chosen),
        chosen[:, :, 1].astype(np.float32),
    )
