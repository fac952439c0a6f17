"""The feed-forward block of a layer without experts. Letters: `jsg/models/inputs.py`."""

import jax
from flax import nnx
from jaxtyping import Array, Float

from jsg.kernels_pallas import ops
from jsg.kernels_pallas.activation import Activation
from jsg.kernels_pallas.inputs import Fp8Kernel, Fp8Rows
from jsg.models.block_spec import FeedForwardSpec
from jsg.models.layers import Linear


class FeedForward(nnx.Module):
    """The feed-forward block: see `FeedForwardSpec`."""

    def __init__(self, spec: FeedForwardSpec, prefix: str, width: int, dtype: jax.typing.DTypeLike):
        self.activation: Activation = spec.activation
        inner, bias = spec.inner, spec.has_bias
        names = tuple(f"{prefix}.{name}" for name in (spec.gate, spec.up) if name is not None)
        self.gate_up = Linear(names, width, (len(names), inner), dtype, split_axis=2, bias=bias)
        self.down = Linear((f"{prefix}.{spec.down}",), inner, (width,), dtype, split_axis=0, bias=bias)

    def part(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """This device's part of the block's result, before it is added up."""
        return self.down.part(self._opened(x))

    def __call__(self, x: Float[Array, "T D"] | Fp8Rows) -> Float[Array, "T D"]:
        """The block's result for each token."""
        return self.down(self._opened(x))

    def _opened(self, x: Float[Array, "T D"] | Fp8Rows) -> Float[Array, "T F"] | Fp8Rows:
        gate_up, kernel = self.gate_up(x), self.down.kernel.get_value()
        if isinstance(kernel, Fp8Kernel):
            return ops.gated_rows(gate_up, self.activation, kernel)
        return ops.gated(gate_up, self.activation)
