"""Attention whose keys and values are one latent row of each token, as a record. No JAX.

DeepSeek-AI 2024, "DeepSeek-V2" (arXiv:2405.04434): multi-head latent attention.
"""

import dataclasses

from jsg.models.block_spec import KVShape, NormSpec, QueryScaleSpec, RopeSpec, require_divisor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Latent attention. A query and a key are a part without rope, and a part with it, which all heads share of keys.

    Attributes:
        heads: Query heads.
        kv_heads: How many times the latent row is kept, once for each device: see `over_devices`.
        query_rank: Width of what queries are made of; None if they are made of the residual stream.
        rank: Width of the latent row without its part with rope.
        plain_dim: Width of the part of a query without rope.
        rope_dim: Width of the part with rope.
        value_dim: Width of a value.
        scale: Multiplies queries · keys.
        rope: How positions turn the parts with rope; None for not at all.
        query_scale: What multiplies queries by their position; None for nothing.
        has_bias: The projections of the residual stream to ranks, and the one after attention, have biases.
        query_norm: The norm of what queries are made of.
        norm: That of the latent row.
    """

    heads: int
    kv_heads: int = 1
    query_rank: int | None
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    scale: float
    rope: RopeSpec | None
    query_scale: QueryScaleSpec | None = None
    has_bias: bool = False
    query_norm: NormSpec
    norm: NormSpec
    window = None
    state_shapes = ()

    @property
    def head_dim(self) -> int:
        """Width of what positions turn."""
        return self.rope_dim

    @property
    def kv_shape(self) -> KVShape:
        """What the layer keeps of a token: its latent row, whose first numbers are the value."""
        return KVShape(self.kv_heads, self.rank + self.rope_dim, has_values=False)

    @property
    def pair_numbers(self) -> int:
        """The products of a new token and a key, in all heads; with those of values there are twice as many."""
        return self.heads * (2 * self.rank + self.rope_dim) // 2

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        queries = self.heads * (self.plain_dim + self.rope_dim)
        made = queries * width if self.query_rank is None else self.query_rank * (width + queries)
        latent = width * (self.rank + self.rope_dim) + self.rank * self.heads * (self.plain_dim + self.value_dim)
        return made + latent + self.heads * self.value_dim * width

    def over_devices(self, count: int) -> "LatentSpec":
        """The same for several devices. Each has some of the query heads, and all of the latent rows."""
        require_divisor(count, count, 1, "num_attention_heads", self.heads)
        return dataclasses.replace(self, kv_heads=count)
