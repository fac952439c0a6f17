"""Linear attention by a selective scan. Letters: `jsg/models/inputs.py`; a group of heads is a key head.

The projections to queries, keys, values and gates of the output are one matmul, [D, K, joint], as in `delta.py`. The
checkpoint has one tensor for all, with gates, values, keys, queries and steps one after another.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.inputs import ScanWeights, StateCache
from jsg.models.inputs import ForwardInputs, LayerArrays
from jsg.models.layers import Linear, parameter, whole
from jsg.models.origin import Origin, Part, Source
from jsg.models.rope import Rotation
from jsg.models.state_specs import MambaSpec
from jsg.models.tensor_parallel import add_up


class Mamba(nnx.Module):
    """The selective scan over the states of one layer, and the norm of each group of its outputs after their gates."""

    def __init__(self, spec: MambaSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        name, groups, values = f"{prefix}.{spec.name}", spec.key_heads, spec.heads * spec.value_dim
        keys = groups // spec.group_repeats * spec.key_dim
        self.spec = spec

        def rows(tensor: str, inputs: tuple[int, ...], *parts: tuple[int, int, int], stored: int) -> tuple[Source, ...]:
            """These rows of a tensor: of each part the first, how many, and how many times each group has them."""
            return tuple(
                Source(f"{name}.{tensor}", (length, *inputs), times, Part((stored, *inputs), first=first))
                for first, length, times in parts
            )

        stored, repeats = 2 * (values + keys) + spec.heads, spec.group_repeats
        after = values + values  # gates and values
        joint = ((after + keys, keys, repeats), (after, keys, repeats), (values, values, 1), (0, values, 1))
        self.joint = Linear(
            rows("in_proj.weight", (width,), *joint, stored=stored),
            width,
            (groups, 2 * (spec.key_dim + values // groups)),
            dtype,
            join_axis=1,
            split_axis=1,
        )
        steps = rows("in_proj.weight", (width,), (stored - spec.heads, spec.heads, 1), stored=stored)
        self.steps = Linear(steps, width, (groups, spec.heads // groups), dtype, join_axis=1, split_axis=1)
        mixed = tuple((first - values, length, times) for first, length, times in joint[:3])
        taps = rows("conv1d.weight", (1, spec.taps), *mixed, stored=values + 2 * keys)
        origin = Origin(taps, join_axis=2, transposed=True, split_axis=1)
        self.taps = parameter((spec.taps, groups, spec.mixed // groups), dtype, origin)
        bias = Origin(rows("conv1d.bias", (), *mixed, stored=values + 2 * keys), join_axis=1, split_axis=0)
        self.bias = parameter((groups, spec.mixed // groups), dtype, bias) if spec.has_bias else None

        self.decay_rate, self.step_bias, self.skip = (
            whole(f"{name}.{each}", (spec.heads,), jnp.float32, split_axis=0) for each in ("A_log", "dt_bias", "D")
        )
        norm = Origin((Source(f"{name}.norm.weight", (values,)),), split_axis=0)
        self.norm = parameter((groups, values // groups), jnp.float32, norm)
        self.output = Linear((f"{name}.out_proj",), values, (width,), dtype, split_axis=0)

    def __call__(
        self, x: Float[Array, "T D"], inputs: ForwardInputs, turn: Rotation, cache: LayerArrays
    ) -> tuple[Float[Array, "T D"], LayerArrays]:
        """The outputs of the tokens, and the states after them. Positions turn nothing."""
        assert inputs.pieces is not None, "a step has its pieces"
        taps, joint = self.taps[...], self.joint(x)
        bias = jnp.zeros(taps.shape[1:], taps.dtype) if self.bias is None else self.bias[...]
        of_heads = self.decay_rate[...], self.step_bias[...], self.skip[...]
        weights = ScanWeights(taps, *of_heads, bias, self.spec.steps)
        is_decode = inputs.attention.tile_rows.shape[0] == 0
        given = (joint, self.steps(x), weights, StateCache(*cache), inputs.pieces)
        made, states = ops.gated_delta(*given, has_one_token=is_decode, tiles=inputs.piece_tiles)
        gates = joint[..., taps.shape[2] :].astype(jnp.float32)
        out = self._normed(made.reshape(gates.shape) * jax.nn.silu(gates))
        return self.output(out.astype(x.dtype).reshape(len(x), -1)), tuple(states)

    def _normed(self, made: Float[Array, "T K values"]) -> Float[Array, "T K values"]:
        """By the mean of each group of the checkpoint, of which several devices may have a part."""
        squares = jnp.square(made).sum(-1, keepdims=True)
        count = self.spec.heads * self.spec.value_dim * self.spec.group_repeats / self.spec.key_heads
        if self.spec.group_repeats > 1:
            squares = add_up(squares.sum(1, keepdims=True))
        return made * lax.rsqrt(squares / count + self.spec.eps) * self.norm[...]
