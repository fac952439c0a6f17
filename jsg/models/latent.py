"""Latent attention, in the form that keeps nothing but the latent row of a token. Letters: `jsg/models/inputs.py`.

The published form makes keys and values of each head from the latent row. A product with a key made by a matrix is a
product with the row of the query times that matrix, and the mean of values made by one is made from the mean of rows.
So all heads read the same rows, and two small matrices of each head stand before and after attention:

    query          plain part · its matrix [rank] | part with rope
    row in pool    latent row, normed [rank]      | part with rope      the value is the first part
    output         mean of rows [rank] · its matrix [value]
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import LayerCache
from jsg.kernels_pallas.reference_write import rotate
from jsg.models.inputs import ForwardInputs
from jsg.models.latent_spec import LatentSpec
from jsg.models.layers import Linear, RMSNorm, exact_precision, parameter
from jsg.models.origin import Origin, Source
from jsg.models.rope import Rotation, grown


class LatentAttention(nnx.Module):
    """Attention over the latent rows of one layer."""

    def __init__(self, spec: LatentSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        name, bias = f"{prefix}.self_attn", spec.has_bias
        heads, plain, value = spec.heads, spec.plain_dim, spec.value_dim
        self.spec = spec
        rank, norm = spec.query_rank, spec.query_norm
        self.query_rank = Linear((f"{name}.q_a_proj",), width, (rank,), dtype, bias=bias) if rank else None
        self.query_norm = RMSNorm(norm, f"{prefix}.", rank, dtype) if rank else None
        self.queries = Linear(
            (f"{name}.q_b_proj" if rank else f"{name}.q_proj",),
            rank or width,
            (heads, plain + spec.rope_dim),
            dtype,
            split_axis=1,
            out_orders=(_order(spec, plain),),
        )
        self.rows = Linear(
            (f"{name}.kv_a_proj_with_mqa",),
            width,
            (spec.rank + spec.rope_dim,),
            dtype,
            bias=bias,
            out_orders=(_order(spec, spec.rank),),
        )
        self.norm = RMSNorm(spec.norm, f"{prefix}.", spec.rank, dtype)
        made = Origin((Source(f"{name}.kv_b_proj.weight", (heads * (plain + value), spec.rank)),), split_axis=0)
        self.of_heads = parameter((heads, plain + value, spec.rank), dtype, made)
        self.output = Linear((f"{name}.o_proj",), heads * value, (width,), dtype, split_axis=0, bias=bias)

    def __call__(
        self,
        x: Float[Array, "T D"],
        inputs: ForwardInputs,
        turn: Rotation,
        cache: LayerCache,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """Attention of the tokens to their context. Writes their rows to the pool first."""
        spec, source = self.spec, x
        if self.query_rank is not None and self.query_norm is not None:
            source = self.query_norm(self.query_rank(x))
        plain, turned = jnp.split(self.queries(source), [spec.plain_dim], axis=-1)
        latent, key = jnp.split(self.rows(x), [spec.rank], axis=-1)
        key = rotate(key[:, None], turn.cos, turn.sin)
        row = jnp.concatenate([self.norm(latent)[:, None], key], axis=-1)
        cache = ops.write_latents(cache, inputs.slots, row)
        to_keys, to_values = jnp.split(self.of_heads[...], [spec.plain_dim], axis=1)
        moved = _each_head("tnp,npr->tnr", plain, to_keys)
        queries = jnp.concatenate([moved, rotate(turned, turn.cos, turn.sin)], axis=-1)
        queries = grown(queries, inputs.positions, spec.query_scale)
        gathered = ops.latent_attention(queries, cache, inputs.attention, scale=spec.scale, value_dim=spec.rank)
        values = _each_head("tnr,nvr->tnv", gathered, to_values)
        return self.output(values.reshape(len(x), -1)), cache


def _order(spec: LatentSpec, before: int) -> tuple[int, ...] | None:
    """The order of rows of a head whose last `rope_dim` numbers are turned."""
    order = spec.rope.row_order(spec.rope_dim)
    return None if order is None else (*range(before), *(before + row for row in order))


def _each_head(
    subscripts: str, x: Float[Array, "T N in"], kernels: Float[Array, "N rows columns"]
) -> Float[Array, "T N out"]:
    """Products of each head with its matrix, in the dtype of `x`."""
    precision = exact_precision(x.dtype)
    return jnp.einsum(subscripts, x, kernels, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
