"""The KV pool on the device: per layer one array for keys and one for values, or both in one where a kernel wants that.

Lists of arrays, not a stacked array: a stacked pool that rides through `scan` is copied (docs/architecture.md).
Page 0 takes the writes of padding tokens and is never allocated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

HEADS_AXIS = 2
"""Of each array: what devices share out."""


class KVPool(NamedTuple):
    """Keys and values of every cached token, per layer. Donated to each step and returned by it.

    Attributes:
        layers: Each (keys, values), `[P, page_size, K, H]`; or one array `[P, page_size, 2·K, H]`, in which the key and
            the value of a head stand side by side (TPU). Only the ops of `kernels_pallas` look inside.
    """

    layers: tuple[tuple[Float[Array, "P page_size heads H"], ...], ...]

    @property
    def page_size(self) -> int:
        """KV slots in one page."""
        return self.layers[0][0].shape[1]


def copy_slots(pool: KVPool, source: Int[Array, " k"], target: Int[Array, " k"]) -> KVPool:
    """The pool with the keys and values of some slots copied to others. Only slot 0, the dump, may be in both."""

    def copy(array: Float[Array, "P page_size heads H"]) -> Float[Array, "P page_size heads H"]:
        size = array.shape[1]
        # The barrier keeps the read out of the write's loop: together they would need a copy of the whole array.
        rows = lax.optimization_barrier(array[source // size, source % size])
        return array.at[target // size, target % size].set(rows)

    return KVPool(jax.tree.map(copy, pool.layers))


def make_pool(
    num_layers: int,
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: jax.typing.DTypeLike,
    *,
    is_interleaved: bool = False,
    sharding: jax.sharding.Sharding | None = None,
) -> KVPool:
    """A zeroed pool of `num_pages` pages, the dump page included. Zeros matter: 0 x NaN garbage would be NaN.

    With a sharding, devices share out the heads.
    """
    arrays = 1 if is_interleaved else 2
    shape = (num_pages, page_size, kv_heads * 2 // arrays, head_dim)

    def layer() -> tuple[Float[Array, "P page_size heads H"], ...]:
        return tuple(jnp.zeros(shape, dtype, device=sharding) for _ in range(arrays))

    return KVPool(tuple(layer() for _ in range(num_layers)))
