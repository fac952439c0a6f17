"""A short convolution between two gates, as a record. No JAX."""

import dataclasses

from jsg.models.block_spec import StateMixer, StateShape, require_divisor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSpec(StateMixer):
    """A causal convolution of each channel, of what a gate lets through, and a gate of its results.

    Attributes:
        channels: The channels, as many as the model is wide.
        taps: How many tokens the convolution sees, with the newest.
        has_bias: The projections and the convolution have biases.
    """

    channels: int
    taps: int
    has_bias: bool

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the layer keeps of a request: the last inputs of the convolution."""
        return (StateShape((self.taps, self.channels), 1),)

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        return 4 * width * self.channels

    def over_devices(self, count: int) -> "ConvolutionSpec":
        """The same for several devices, which share out the channels."""
        require_divisor(count, count, 1, "hidden_size", self.channels)
        return self
