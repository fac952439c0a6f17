"""How many experts of a layer a step reads, and how many copies of tokens they compute.

Nobody knows beforehand which experts the tokens choose. Here every choice is equally likely and tokens choose
independently. Mixtral's authors found no obvious pattern by topic, but consecutive tokens share experts more often than
by chance (arXiv:2401.04088, section 5). So a real step may be less even than this, most of all a chunk of one text.

Groups of devices that have experts of their own wait for each other after every layer, so the busiest group of each
layer counts. Its average is drawn with one seed, so the figures are the same at every call.
"""

import dataclasses
import functools

import numpy as np

DRAWN_NUMBERS = 2**20
FEWEST_DRAWS, MOST_DRAWS = 16, 2**12
"""Bounds of the number of steps to draw, which `DRAWN_NUMBERS` random numbers would otherwise give."""


@dataclasses.dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What the busiest group does in a layer, on average.

    Attributes:
        num_read: Experts that at least one token chose.
        num_copies: Tokens that its experts compute; a token counts once for each of its experts.
    """

    num_read: float
    num_copies: float


@functools.lru_cache(maxsize=64)
def expert_load(num_experts: int, experts_per_token: int, num_tokens: int, num_groups: int = 1) -> ExpertLoad:
    """The load of one layer.

    Args:
        num_experts: Experts in all groups.
        experts_per_token: Different experts of one token, at most `num_experts`.
        num_tokens: Tokens of the step.
        num_groups: Groups of devices with equally many experts; 1 where every device has part of all experts.
    """
    if num_groups == 1:
        part_unread = (1 - experts_per_token / num_experts) ** num_tokens
        return ExpertLoad(num_experts * (1 - part_unread), float(num_tokens * experts_per_token))
    rng, sums = np.random.default_rng(0), np.zeros(2)
    draws = min(max(DRAWN_NUMBERS // (num_tokens * num_experts), FEWEST_DRAWS), MOST_DRAWS)
    for _ in range(draws):
        order = np.argsort(rng.random((num_tokens, num_experts), np.float32), axis=1)
        copies = np.bincount(order[:, :experts_per_token].reshape(-1), minlength=num_experts).reshape(num_groups, -1)
        sums += (copies > 0).sum(1).max(), copies.sum(1).max()
    return ExpertLoad(*(sums / draws).tolist())
