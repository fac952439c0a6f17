"""Linear attention by the gated delta rule. Letters: `jsg/models/inputs.py`.

The projections to queries, keys, values and gates of the output are one matmul: [D, K, joint] holds those of each key
head, so that a slice along K is a smaller layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import DeltaWeights, GatesApart, StateCache
from jsg.models.block_spec import NormSpec
from jsg.models.inputs import ForwardInputs, LayerArrays
from jsg.models.layers import Linear, RMSNorm, parameter, whole
from jsg.models.origin import Origin, Source, side_by_side
from jsg.models.rope import Rotation
from jsg.models.state_specs import DeltaSpec


class DeltaAttention(nnx.Module):
    """The gated delta rule over the states of one layer."""

    def __init__(self, spec: DeltaSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        name, heads, values = f"{prefix}.{spec.module}", spec.key_heads, spec.heads * spec.value_dim
        keys, rank = heads * spec.key_dim, spec.gate_rank
        self.spec = spec
        each = (keys, keys, values, values)
        of_kinds = each[: len(spec.projections)] if len(spec.projections) > 1 else (sum(each),)
        self.joint = Linear(
            tuple(f"{name}.{projection}" for projection in spec.projections),
            width,
            (heads, sum(of_kinds) // heads),
            dtype,
            out_dims=of_kinds,
            join_axis=1,
            split_axis=1,
        )
        gates, num_gates = tuple(f"{name}.{gate}" for gate in spec.gates), spec.heads * (1 if rank else 2)
        self.gates = Linear(gates, width, (heads, num_gates // heads), dtype, join_axis=1, split_axis=1)
        convolutions = [f"{name}.{convolution}.weight" for convolution in spec.convolutions]
        sources = side_by_side(convolutions, each[:3], (1, spec.taps), (1,) * 3, (None,) * 3)
        taps = Origin(sources, join_axis=2, transposed=True, split_axis=1)
        self.taps = parameter((spec.taps, heads, spec.mixed // heads), dtype, taps)

        if rank is None:
            self.decay_rate, self.decay_bias = (
                whole(f"{name}.{tensor}", (spec.heads,), jnp.float32, split_axis=0) for tensor in ("A_log", "dt_bias")
            )
        else:
            self.decay_rate = whole(f"{name}.A_log", (1, 1, spec.heads, 1), jnp.float32, split_axis=2)
            bias = Origin((Source(f"{name}.dt_bias", (spec.heads * spec.key_dim,)),), split_axis=0)
            self.decay_bias = parameter((spec.heads, spec.key_dim), jnp.float32, bias)
        self.norm = RMSNorm(NormSpec(name=spec.norm, eps=spec.eps), f"{name}.", spec.value_dim, jnp.float32)
        self.output = Linear((f"{name}.{spec.output}",), values, (width,), dtype, split_axis=0)
        self.apart = _GatesApart(spec, rank, name, width, dtype) if rank else None

    def __call__(
        self, x: Float[Array, "T D"], inputs: ForwardInputs, turn: Rotation, cache: LayerArrays
    ) -> tuple[Float[Array, "T D"], LayerArrays]:
        """The outputs of the tokens, and the states after them. Positions turn nothing."""
        assert inputs.pieces is not None, "a step has its pieces"
        of_heads = self.decay_rate[...].reshape(-1), self.decay_bias[...]
        weights = DeltaWeights(self.taps[...], *of_heads, self.norm.factor, self.spec.eps)
        of_gates, apart = x, None
        if self.apart is not None:  # small products of the same rows XLA makes one, for which it joins their kernels
            of_gates, *of_apart = lax.optimization_barrier((x,) * 3)
            apart = self.apart(*of_apart)
        is_decode = inputs.attention.tile_rows.shape[0] == 0
        given = (self.joint(x), self.gates(of_gates), weights, StateCache(*cache), inputs.pieces)
        out, states = ops.gated_delta(*given, apart=apart, has_one_token=is_decode, tiles=inputs.piece_tiles)
        return self.output(out.reshape(len(x), -1)), tuple(states)


class _GatesApart(nnx.Module):
    """What `GatesApart` has. It is made of few numbers of the residual stream, which each device has all of."""

    def __init__(self, spec: DeltaSpec, rank: int, name: str, width: int, dtype: jax.typing.DTypeLike):
        heads, group = spec.key_heads, spec.heads // spec.key_heads
        self.to_decay, self.to_output = (Linear((f"{name}.{gate}_a_proj",), width, (rank,), dtype) for gate in "fg")
        self.decay, self.output = (
            Linear((f"{name}.{gate}_b_proj",), rank, (heads, group * each), dtype, split_axis=1)
            for gate, each in (("f", spec.key_dim), ("g", spec.value_dim))
        )

    def __call__(self, of_decay: Float[Array, "T D"], of_output: Float[Array, "T D"]) -> GatesApart:
        return GatesApart(self.decay(self.to_decay(of_decay)), self.output(self.to_output(of_output)))
