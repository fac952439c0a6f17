"""How the experts of a token are chosen and weighed, as a record. No JAX."""

import dataclasses
import math
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceSpec:
    """A token uses the experts with the largest scores, and a score is the weight of its expert.

    A bias of each expert, which is an array and no field, may be added to the scores for the choice, but not for the
    weights.

    Attributes:
        per_token: Experts that a token uses.
        score: Scores are a softmax of the logits of all experts, or the sigmoid of each logit.
        groups: Experts stand in so many groups of equal length, at least two experts in each if there are several. The
            two best scores of a group are added up, and a token uses experts of the groups with the largest sums.
        kept_groups: How many groups that are. They have `per_token` experts or more.
        masked_score: The score that experts of the other groups have in the choice.
        is_renormed: Weights are divided by their sum.
        least_sum: The sum counts as at least this.
        added_sum: Added to the sum.
        factor: Multiplies the weights in the end.
    """

    per_token: int
    score: Literal["softmax", "sigmoid"] = "softmax"
    groups: int = 1
    kept_groups: int = 1
    masked_score: float = -math.inf
    is_renormed: bool = True
    least_sum: float = 0.0
    added_sum: float = 0.0
    factor: float = 1.0
