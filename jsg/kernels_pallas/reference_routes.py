"""Which experts each token goes to, and where its copies stand when they are sorted by expert, in plain `jnp`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class Routes(NamedTuple):
    """A token's way to its experts and back. Copies are sorted by expert, those of one expert by token.

    Attributes:
        weights: Of each token's experts, the largest first; they sum to one.
        places: Where each token's copies stand among the sorted ones.
        tokens: The token that each sorted copy is of.
        sizes: Copies of each expert.
    """

    weights: Float[Array, "T k"]
    places: Int[Array, "T k"]
    tokens: Int[Array, " copies"]
    sizes: Int[Array, " E"]


def expert_routes(logits: Float[Array, "T E"], experts_per_token: int) -> Routes:
    """See `ops.expert_routes`."""
    likely, experts = lax.top_k(jax.nn.softmax(logits), experts_per_token)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    return Routes(
        weights=likely / likely.sum(-1, keepdims=True),
        places=jnp.argsort(order).reshape(experts.shape).astype(jnp.int32),
        tokens=(order // experts_per_token).astype(jnp.int32),
        sizes=jnp.bincount(experts.reshape(-1), length=logits.shape[1]).astype(jnp.int32),
    )
