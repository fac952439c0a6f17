"""The KV pool on the device: for each layer an array of keys and one of values, or on a TPU one array of both.

It is a list of arrays and not one stacked array, since a stacked pool that goes through `scan` is copied
(docs/packages/cache.md). Padding tokens are written to page 0, which is never allocated.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

LANES = 128
"""A row of a TPU's memory has so many numbers, or is padded to that."""
HIDDEN_KEPT = 16
"""Hidden states of a row. With more drafts in a step, of which an early one is wrong, the next draft is worse."""


Place = Callable[[int, int], jax.sharding.Sharding | None]
"""The sharding of an array with so many axes, of which this one is divided among devices: from the axis and them."""


class KVPool(NamedTuple):
    """Keys and values of all cached tokens, by layer. Each step takes the pool as a donation and returns it.

    Attributes:
        layers: For each layer with keys (keys, values), `[P, page_size, K, H]`; on a TPU one array of both, in which
            the tokens of a page stand side by side for each head: `[P, K, 2, page_size, H]`, or if H is no multiple of
            128 `[P, K, 1, page_size, 2·H]`, where rows have a key and its value. A layer whose values are the first
            numbers of its keys has the keys only, and one that reads those of another layer has none. Only
            `kernels_pallas` looks inside.
        states: For each layer with states of requests in place of keys its arrays, by slot. Slot 0 is for padding.
        hidden: If the model drafts tokens itself, for each request row the final hidden states of its last tokens: that
            of the token at position p in place p % `HIDDEN_KEPT`. Else nothing. The last of `layers` drafts.
    """

    layers: tuple[tuple[Float[Array, "P _ _ *rest"], ...], ...]
    states: tuple[tuple[Float[Array, "slots ..."], ...], ...] = ()
    hidden: tuple[Float[Array, "R kept D"], ...] = ()

    @property
    def page_size(self) -> int:
        """KV slots in one page."""
        return _page_size(self.layers[0][0])


def heads_axis(num_axes: int) -> int:
    """The axis of an array of `KVPool.layers` that is divided among devices. With five axes it is one for a TPU."""
    return 1 if num_axes == 5 else 2


def _page_size(array: Float[Array, "P _ _ *rest"]) -> int:
    return array.shape[3 if array.ndim == 5 else 1]


def copy_slots(pool: KVPool, source: Int[Array, " k"], target: Int[Array, " k"]) -> KVPool:
    """The pool with keys and values of some slots copied to others. Only slot 0, for padding, may be in both."""

    def copy(array: Float[Array, "P _ _ *rest"]) -> Float[Array, "P _ _ *rest"]:
        size, between = _page_size(array), (slice(None),) * (2 if array.ndim == 5 else 0)
        # The barrier keeps the read out of the write's loop: together they would need a copy of the whole array.
        rows = lax.optimization_barrier(array[source // size, *between, source % size])
        return array.at[target // size, *between, target % size].set(rows)

    return pool._replace(layers=jax.tree.map(copy, pool.layers))


def make_states(
    shapes: Sequence[Sequence[tuple[tuple[int, ...], int, str | None]]],
    num_slots: int,
    dtype: jax.typing.DTypeLike,
    place: Place = lambda *_: None,
) -> tuple[tuple[Float[Array, "slots ..."], ...], ...]:
    """The states of `num_slots` requests, slot 0 included, in each layer that has any.

    Args:
        shapes: For each layer the shape of each of its arrays for one request, its axis of heads, and its type; None
            for `dtype`.
        num_slots: Slots.
        dtype: Type of activations.
        place: How devices share an array.
    """
    return tuple(
        tuple(
            jnp.zeros((num_slots, *shape), own or dtype, device=place(axis + 1, len(shape) + 1))
            for shape, axis, own in arrays
        )
        for arrays in shapes
    )


def make_pool(
    kv_shapes: Sequence[tuple[int, int] | tuple[int, int, bool]],
    num_pages: int | Sequence[int],
    page_size: int,
    dtype: jax.typing.DTypeLike,
    *,
    is_by_head: bool = False,
    place: Place = lambda *_: None,
) -> KVPool:
    """A pool of zeros with `num_pages` pages, page 0 included, or for each layer so many.

    `kv_shapes` has for each layer the number of key-value heads and the width of one, and whether it keeps values. A
    layer without heads has no arrays. `is_by_head` is for a TPU (see `KVPool.layers`) and `place` as in `make_states`.

    Zeros matter: attention multiplies masked values by 0, and 0 times a NaN in uninitialised memory would be NaN.
    """

    def layer(count: int, kv_shape: tuple[int, int] | tuple[int, int, bool]) -> tuple[Float[Array, "P _ _ *rest"], ...]:
        kv_heads, head_dim = kv_shape[:2]
        if not kv_heads:
            return ()
        has_values = len(kv_shape) == 2 or bool(kv_shape[2])
        shape: tuple[int, ...] = (count, page_size, kv_heads, head_dim)
        if has_values and is_by_head:
            parts = 1 if head_dim % LANES else 2
            shape = (count, kv_heads, parts, page_size, 2 * head_dim // parts)
        device = place(heads_axis(len(shape)), len(shape))
        return tuple(jnp.zeros(shape, dtype, device=device) for _ in range(2 if has_values and not is_by_head else 1))

    counts = [num_pages] * len(kv_shapes) if isinstance(num_pages, int) else num_pages
    return KVPool(tuple(layer(count, shape) for count, shape in zip(counts, kv_shapes, strict=True)))
