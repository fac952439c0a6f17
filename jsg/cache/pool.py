"""The KV pool on the device: one array per layer for keys and one for values.

Lists of arrays, not a stacked array: a stacked pool that rides through `scan` is copied (docs/architecture.md).
Page 0 takes the writes of padding tokens and is never allocated.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class KVPool(NamedTuple):
    """Keys and values of every cached token, per layer. Donated to each step and returned by it."""

    keys: tuple[Float[Array, "P page_size K H"], ...]
    values: tuple[Float[Array, "P page_size K H"], ...]

    @property
    def page_size(self) -> int:
        """KV slots in one page."""
        return self.keys[0].shape[1]


def make_pool(
    num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: jax.typing.DTypeLike
) -> KVPool:
    """A zeroed pool of `num_pages` pages, the dump page included. Zeros matter: 0 x NaN garbage would be NaN."""
    shape = (num_pages, page_size, kv_heads, head_dim)
    return KVPool(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
    )
