"""A short convolution between two gates. Letters: `jsg/models/inputs.py`; C channels."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jsg.kernels_pallas import ops
from jsg.models.inputs import ForwardInputs, LayerArrays
from jsg.models.layers import Linear, parameter, whole
from jsg.models.origin import Origin, Source
from jsg.models.rope import Rotation
from jsg.models.state_specs import ConvolutionSpec


class GatedConvolution(nnx.Module):
    """out(gate · convolution(input gate · x)), of which a request has the last inputs of the convolution."""

    def __init__(self, spec: ConvolutionSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        name, channels, bias = f"{prefix}.conv", spec.channels, spec.has_bias
        self.joint = Linear((f"{name}.in_proj",) * 3, width, (3, channels), dtype, split_axis=2, bias=bias)
        taps = Origin((Source(f"{name}.conv.weight", (channels, 1, spec.taps)),), transposed=True, split_axis=1)
        self.taps = parameter((spec.taps, channels), dtype, taps)
        self.bias = whole(f"{name}.conv.bias", (channels,), dtype, split_axis=0) if bias else None
        self.output = Linear((f"{name}.out_proj",), channels, (width,), dtype, split_axis=0, bias=bias)

    def __call__(
        self, x: Float[Array, "T D"], inputs: ForwardInputs, turn: Rotation, cache: LayerArrays
    ) -> tuple[Float[Array, "T D"], LayerArrays]:
        """The outputs of the tokens, and the last inputs after them. Positions turn nothing."""
        assert inputs.pieces is not None, "a step has its pieces"
        joint, is_decode = self.joint(x), inputs.attention.tile_rows.shape[0] == 0
        first, gate, mixed = joint[:, 0], joint[:, 1], joint[:, 2]
        out, last = ops.short_convolution(
            first * mixed, self.taps[...], cache[0], inputs.pieces, has_one_token=is_decode
        )
        out = out if self.bias is None else out + self.bias[...].astype(jnp.float32)
        return self.output((out * gate.astype(jnp.float32)).astype(x.dtype)), (last,)
