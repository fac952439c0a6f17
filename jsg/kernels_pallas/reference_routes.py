"""The experts of each token, and the places of its copies when they are sorted by expert, in plain `jnp`."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jsg.kernels_pallas.choice import choice_scores, scores_of, weights_of
from jsg.kernels_pallas.choice_spec import ChoiceSpec


class Routes(NamedTuple):
    """Where each token's copies go. Copies are sorted by expert, and those of one expert by token.

    If devices have experts of their own, each device has its own experts in front: the order begins with them, goes on
    with those of the next devices, and continues after the last expert with the first.

    Attributes:
        weights: Weights of each token's experts, in the order of the choice. Another device's expert has zero.
        places: Places of each token's copies among the sorted copies.
        tokens: The token of each sorted copy.
        sizes: Copies of each of this device's experts. If they are not all `copies`, those of others stand behind.
    """

    weights: Float[Array, "T k"]
    places: Int[Array, "T k"]
    tokens: Int[Array, " copies"]
    sizes: Int[Array, " own"]


def expert_routes(
    logits: Float[Array, "T E"],
    choice: ChoiceSpec,
    *,
    bias: Float[Array, " E"] | None = None,
    first: Int[Array, ""] | int,
    num_own: int,
    num_real: Int[Array, ""] | int | None = None,
) -> Routes:
    """See `ops.expert_routes`."""
    if num_real is not None:
        logits = logits[jnp.clip(jnp.arange(len(logits)), max=jnp.maximum(num_real - 1, 0))]
    num_experts, scores = logits.shape[1], scores_of(choice, logits)
    _, experts = lax.top_k(choice_scores(choice, logits, scores, bias, num_experts), choice.per_token)
    chosen = jnp.take_along_axis(scores, experts, 1)
    place = (experts - first) % num_experts
    order = jnp.argsort(place.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=num_experts).astype(jnp.int32)
    return Routes(
        weights=jnp.where(place < num_own, weights_of(choice, chosen, chosen.sum(-1, keepdims=True)), 0),
        places=jnp.argsort(order).reshape(experts.shape).astype(jnp.int32),
        tokens=(order // choice.per_token).astype(jnp.int32),
        sizes=lax.dynamic_slice_in_dim(sizes, first, num_own),
    )
