"""The functions of gates, in a file of their own so that the records of models load no JAX."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClampedGate:
    """x · sigmoid(slope · x) of a gate that is at most `limit`. What it lets through is clamped and made one larger.

    Attributes:
        limit: The largest gate, and the largest absolute value of what it lets through.
        slope: Multiplies the gate in the sigmoid.
    """

    limit: float
    slope: float


Activation = Literal["silu", "gelu_tanh", "relu2"] | ClampedGate
"""What a feed-forward block lets through: x · sigmoid(x), or GELU with tanh in place of the error function, or clamped.
One without gates has max(x, 0)²."""
