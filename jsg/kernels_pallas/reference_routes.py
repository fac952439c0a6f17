"""Which experts each token goes to, and where its copies stand when they are sorted by expert, in plain `jnp`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


class Routes(NamedTuple):
    """A token's way to its experts and back. Copies are sorted by expert, those of one expert by token.

    Of several devices that have experts of their own, each has other ones in front: the order goes on from its last
    expert to the next device's, and from the last of all to the first.

    Attributes:
        weights: Of each token's experts, the largest first; they sum to one. Zero where another device has the expert.
        places: Where each token's copies stand among the sorted ones.
        tokens: The token that each sorted copy is of.
        sizes: Copies of each expert that this device has; where their sum is not `copies`, others' stand behind them.
    """

    weights: Float[Array, "T k"]
    places: Int[Array, "T k"]
    tokens: Int[Array, " copies"]
    sizes: Int[Array, " own"]


def expert_routes(
    logits: Float[Array, "T E"], experts_per_token: int, *, first: Int[Array, ""] | int, num_own: int
) -> Routes:
    """See `ops.expert_routes`."""
    num_experts = logits.shape[1]
    likely, experts = lax.top_k(jax.nn.softmax(logits), experts_per_token)
    place = (experts - first) % num_experts
    order = jnp.argsort(place.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.int32)
    return Routes(
        weights=jnp.where(place < num_own, likely / likely.sum(-1, keepdims=True), 0),
        places=jnp.argsort(order).reshape(experts.shape).astype(jnp.int32),
        tokens=(order // experts_per_token).astype(jnp.int32),
        sizes=lax.dynamic_slice_in_dim(sizes, first, num_own),
    )
