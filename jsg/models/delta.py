"""Linear attention by the gated delta rule. Letters: `jsg/models/inputs.py`.

The projections to queries, keys, values and gates of the output are one matmul: [D, K, joint] holds those of each key
head, so that a slice along K is a smaller layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import DeltaWeights, StateCache
from jsg.models.block_spec import NormSpec
from jsg.models.delta_spec import DeltaSpec
from jsg.models.inputs import ForwardInputs, LayerArrays
from jsg.models.layers import Linear, RMSNorm, parameter
from jsg.models.origin import Origin, Part, Source
from jsg.models.rope import Rotation


class DeltaAttention(nnx.Module):
    """The gated delta rule over the states of one layer."""

    def __init__(self, spec: DeltaSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        name, heads, values = f"{prefix}.linear_attn", spec.key_heads, spec.heads * spec.value_dim
        keys = heads * spec.key_dim
        self.spec = spec
        of_kinds = (keys, keys, values, values) if len(spec.projections) > 1 else (2 * (keys + values),)
        self.joint = Linear(
            tuple(f"{prefix}.{projection}" for projection in spec.projections),
            width,
            (heads, sum(of_kinds) // heads),
            dtype,
            out_dims=of_kinds,
            join_axis=1,
            split_axis=1,
        )
        gates = tuple(f"{prefix}.{gate}" for gate in spec.gates)
        self.gates = Linear(gates, width, (heads, 2 * spec.heads // heads), dtype, join_axis=1, split_axis=1)
        rows, stored = (0, keys, 2 * keys), (spec.mixed, 1, spec.taps)
        sources = tuple(
            Source(f"{name}.conv1d.weight", (length, 1, spec.taps), part=Part(stored, first=first))
            for first, length in zip(rows, (keys, keys, values), strict=True)
        )
        taps = Origin(sources, join_axis=2, transposed=True, split_axis=1)
        self.taps = parameter((spec.taps, heads, spec.mixed // heads), dtype, taps)

        def of_heads(tensor: str) -> nnx.Param:
            origin = Origin((Source(f"{name}.{tensor}", (spec.heads,)),), split_axis=0)
            return parameter((spec.heads,), jnp.float32, origin)

        self.decay_rate, self.decay_bias = of_heads("A_log"), of_heads("dt_bias")
        self.norm = RMSNorm(NormSpec(name="norm", eps=spec.eps), f"{name}.", spec.value_dim, jnp.float32)
        self.output = Linear((f"{name}.out_proj",), values, (width,), dtype, split_axis=0)

    def __call__(
        self, x: Float[Array, "T D"], inputs: ForwardInputs, turn: Rotation, cache: LayerArrays
    ) -> tuple[Float[Array, "T D"], LayerArrays]:
        """The outputs of the tokens, and the states after them. Positions turn nothing."""
        assert inputs.pieces is not None, "a step has its pieces"
        of_heads = self.decay_rate[...], self.decay_bias[...]
        weights = DeltaWeights(self.taps[...], *of_heads, self.norm.factor, self.spec.eps)
        is_decode = inputs.attention.tile_rows.shape[0] == 0
        given = (self.joint(x), self.gates(x), weights, StateCache(*cache), inputs.pieces)
        out, states = ops.gated_delta(*given, has_one_token=is_decode, tiles=inputs.piece_tiles)
        return self.output(out.reshape(len(x), -1)), tuple(states)
