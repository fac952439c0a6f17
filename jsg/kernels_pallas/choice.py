"""The scores by which experts are chosen, and the weights of those that are: for the reference and for the kernel.

The kernel gives a block of tokens, so nothing here is but arithmetic and sums over experts. t tokens, e experts.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jsg.kernels_pallas.choice_spec import ChoiceSpec

LEAST = -1e38
"""The least score in a choice, which a NaN counts as. Twice as little is finite too."""


def scores_of(
    spec: ChoiceSpec, logits: Float[Array, "t e"], is_expert: Bool[Array, "1 e"] | None = None
) -> Float[Array, "t e"]:
    """The score of each expert. Where there is no expert, the logit is -inf."""
    if spec.score == "sigmoid":
        return 1 / (1 + jnp.exp(-logits))
    likely = jnp.exp(logits - logits.max(1, keepdims=True))
    if is_expert is not None:
        likely = jnp.where(is_expert, likely, 0.0)
    return likely / likely.sum(1, keepdims=True)


def choice_scores(
    spec: ChoiceSpec,
    logits: Float[Array, "t e"],
    scores: Float[Array, "t e"],
    bias: Float[Array, " e"] | None,
    num_experts: int,
) -> Float[Array, "t e"]:
    """What the choice compares: at least `LEAST` for each of the first `num_experts`.

    Large logits differ where their sigmoids are rounded to 1, so a choice by nothing but sigmoids is one by logits.
    """
    if spec.score == "sigmoid" and bias is None and spec.groups == spec.kept_groups:
        scores = logits
    biased = scores if bias is None else scores + bias[None, :]
    biased = jnp.where(biased >= LEAST, biased, LEAST)
    if spec.groups == spec.kept_groups:
        return biased
    length, expert = num_experts // spec.groups, jnp.arange(scores.shape[1])[None, :]
    sums = [_best_two(biased, expert, first, length) for first in range(0, num_experts, length)]
    is_kept = jnp.zeros(scores.shape, bool)
    for i, own in enumerate(sums):
        before = [jnp.where(other >= own, 1, 0) for other in sums[:i]]  # of equal groups the first counts
        better = [*before, *(jnp.where(other > own, 1, 0) for other in sums[i + 1 :])]
        is_in = (expert >= i * length) & (expert < (i + 1) * length)
        is_kept |= is_in & (functools.reduce(jnp.add, better) < spec.kept_groups)[:, None]
    return jnp.where(is_kept, biased, max(spec.masked_score, LEAST))


def _best_two(scores: Float[Array, "t e"], expert: Array, first: int, length: int) -> Float[Array, " t"]:
    """The sum of the two best of `length` experts."""
    left = jnp.where((expert >= first) & (expert < first + length), scores, 2 * LEAST)
    best = left.max(1)
    at = jnp.where(left == best[:, None], expert, scores.shape[1]).min(1)
    return best + jnp.where(expert == at[:, None], 2 * LEAST, left).max(1)


def weights_of(spec: ChoiceSpec, scores: Float[Array, "*t"], total: Float[Array, "*#t"]) -> Float[Array, "*t"]:
    """The weights of chosen experts, from their scores and the sum of those of their token."""
    if spec.is_renormed:
        total = jnp.maximum(total, spec.least_sum) if spec.least_sum else total
        scores = scores / (total + spec.added_sum if spec.added_sum else total)
    return scores if spec.factor == 1 else scores * spec.factor
