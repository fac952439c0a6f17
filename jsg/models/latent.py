"""Latent attention, in the form that keeps nothing but the latent row of a token. Letters: `jsg/models/inputs.py`.

The published form makes keys and values of each head from the latent row. A product with a key made by a matrix is a
product with the row of the query times that matrix, and the mean of values made by one is made from the mean of rows.
So all heads read the same rows, and two small matrices of each head come before and after attention:

    query          plain part · its matrix [rank] | part with rope
    row in pool    latent row, normed [rank]      | part with rope      the value is the first part
    output         mean of rows [rank] · its matrix [value]
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import LayerCache
from jsg.kernels_pallas.reference_write import rotate
from jsg.models.inputs import ForwardInputs
from jsg.models.latent_spec import LatentSpec
from jsg.models.layers import Linear, RMSNorm, activation_result, exact_precision, parameter
from jsg.models.origin import Origin, Part, Source
from jsg.models.rope import Rotation, grown


class LatentAttention(nnx.Module):
    """Attention over the latent rows of one layer."""

    def __init__(self, spec: LatentSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        name, bias = f"{prefix}.self_attn", spec.has_bias
        heads, plain, value = spec.heads, spec.plain_dim, spec.value_dim
        self.spec = spec
        rank, norm = spec.query_rank, spec.query_norm
        self.query_norm = RMSNorm(norm, f"{prefix}.", rank, dtype) if rank else None
        self.queries = Linear(
            (f"{name}.q_b_proj" if rank else f"{name}.q_proj",),
            rank or width,
            (heads, plain + spec.rope_dim),
            dtype,
            split_axis=1,
            out_orders=(_order(spec, plain),),
        )
        # Both that read the residual stream are one kernel: two would be joined by XLA in each step.
        names, widths, orders = (
            (f"{name}.kv_a_proj_with_mqa",),
            (spec.rank + spec.rope_dim,),
            (_order(spec, spec.rank),),
        )
        if rank:
            names, widths, orders = (f"{name}.q_a_proj", *names), (rank, *widths), (None, *orders)
        how = {"bias": bias, "out_dims": widths, "out_orders": orders}
        self.rows = Linear(names, width, (sum(widths),), dtype, **how)
        self.norm = RMSNorm(spec.norm, f"{prefix}.", spec.rank, dtype)
        # Parts of one kernel would be copied in each step, because a product takes whole arrays.
        self.to_keys, self.to_values = (
            _of_heads(f"{name}.kv_b_proj.weight", spec, first, rows, dtype)
            for first, rows in ((0, plain), (plain, value))
        )
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
        read = self.rows(x)
        if self.query_norm is None or spec.query_rank is None:
            source = lax.optimization_barrier(x)  # against that joining
        else:
            source, read = jnp.split(read, [spec.query_rank], axis=-1)
            source = self.query_norm(source)
        plain, turned = jnp.split(self.queries(source), [spec.plain_dim], axis=-1)
        latent, key = jnp.split(read, [spec.rank], axis=-1)
        row = jnp.concatenate([self.norm(latent)[:, None], self._turned(key[:, None], turn)], axis=-1)
        cache = ops.write_latents(cache, inputs.slots, row)
        moved = _each_head("tnp,npr->tnr", plain, self.to_keys[...])
        queries = jnp.concatenate([moved, self._turned(turned, turn)], axis=-1)
        queries = grown(queries, inputs.positions, spec.query_scale)
        gathered = ops.latent_attention(queries, cache, inputs.attention, scale=spec.scale, value_dim=spec.rank)
        values = _each_head("tnr,nvr->tnv", gathered, self.to_values[...])
        return self.output(values.reshape(len(x), -1)), cache

    def _turned(self, x: Float[Array, "T N H"], turn: Rotation) -> Float[Array, "T N H"]:
        return x if self.spec.rope is None else rotate(x, turn.cos, turn.sin)


def _of_heads(name: str, spec: LatentSpec, first: int, rows: int, dtype: jax.typing.DTypeLike) -> nnx.Param:
    """Some rows of each head of a tensor that has, for each head, rows for keys and rows for values."""
    head = spec.plain_dim + spec.value_dim
    part = Part((spec.heads * head, spec.rank), first=first, order=tuple(range(rows)), head=head)
    origin = Origin((Source(name, (spec.heads * rows, spec.rank), part=part),), split_axis=0)
    return parameter((spec.heads, rows, spec.rank), dtype, origin)


def _order(spec: LatentSpec, before: int) -> tuple[int, ...] | None:
    """The order of rows of a head whose last `rope_dim` numbers are turned."""
    order = None if spec.rope is None else spec.rope.row_order(spec.rope_dim)
    return None if order is None else (*range(before), *(before + row for row in order))


def _each_head(
    subscripts: str, x: Float[Array, "T N in"], kernels: Float[Array, "N rows columns"]
) -> Float[Array, "T N out"]:
    """Products of each head with its matrix, in the dtype of `x`."""
    how = {"precision": exact_precision(x.dtype), "preferred_element_type": activation_result(x.dtype)}
    return jnp.einsum(subscripts, x, kernels, **how).astype(x.dtype)
