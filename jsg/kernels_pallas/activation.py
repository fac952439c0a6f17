"""The functions of gates, in a file of their own so that the records of models load no JAX."""

from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
"""What a feed-forward block lets through: x · sigmoid(x), or GELU with tanh in place of the error function."""
