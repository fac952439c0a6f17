"""Penalties and biases of logits, in plain `jnp`. Letters: `jsg/models/inputs.py`."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Penalties(NamedTuple):
    """What changes the logits of each row, and which row of the tables of tokens it has.

    Attributes:
        rows: The row of the tables.
        is_used: Whether the row has any; the others keep their logits.
        repetition: What logits of tokens that were seen are divided by, or multiplied with if they are negative.
        frequency: What each of a token's counts subtracts.
        presence: What is subtracted once.
    """

    rows: Int[Array, " R"]
    is_used: Bool[Array, " R"]
    repetition: Float[Array, " R"]
    frequency: Float[Array, " R"]
    presence: Float[Array, " R"]


def penalised(
    logits: Float[Array, "R V"], counts: Int[Array, "rows V"], bias: Float[Array, "rows V"], penalties: Penalties
) -> Float[Array, "R V"]:
    """See `ops.penalised`."""
    numbers = (x[:, None] for x in (penalties.repetition, penalties.frequency, penalties.presence))
    changed = changed_by(logits, counts[penalties.rows], bias[penalties.rows], *numbers)
    return jnp.where(penalties.is_used[:, None], changed, logits)


def changed_by(
    logits: Float[Array, "R n"],
    counts: Int[Array, "R n"],
    bias: Float[Array, "R n"],
    repetition: Float[Array, "R 1"],
    frequency: Float[Array, "R 1"],
    presence: Float[Array, "R 1"],
) -> Float[Array, "R n"]:
    """The logits after the penalties and biases of their own tokens."""
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    out = jnp.where(counts > 0, repeated, logits)
    num_outputs = (counts >> 1).astype(jnp.float32)
    once = jnp.minimum(num_outputs, 1)  # of a comparison that is used twice XLA would keep an array [R, V]
    return out - (frequency * num_outputs + presence * once) + bias
