"""Mixers that keep nothing of a token, but a state of each request, as records. No JAX."""

import dataclasses

from jsg.models.block_spec import StateMixer, StateShape, require_divisor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadStates(StateMixer):
    """Linear attention of heads with a matrix each, over queries, keys and values that a short convolution mixes.

    Attributes:
        key_heads: Heads of queries and keys.
        heads: Heads of values, each with a state; a multiple of `key_heads`.
        key_dim: Width of a query and key.
        value_dim: Width of a value.
        taps: How many tokens the convolution sees, with the newest.
        eps: What the norm of outputs adds to the mean square.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float

    @property
    def mixed(self) -> int:
        """Channels of the convolution."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the layer keeps of a request: the last inputs of the convolution, and a matrix for each head."""
        inputs = (self.taps, self.key_heads, self.mixed // self.key_heads)
        return StateShape(inputs, 1), StateShape((self.heads, self.value_dim, self.key_dim), 0, "float32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec(HeadStates):
    """A gated delta rule: Yang et al. 2024, "Gated Delta Networks" (arXiv:2412.06464).

    Attributes:
        gate_rank: Width of what the decays of each number of a key, and the gates of the output, are made of: see
            `GatesApart`. None if a head has one decay, and its gates are among the projections.
        module: What the names of all its tensors begin with.
        projections: The tensors of the projections to queries, keys, values and gates of the output, without
            `.weight`: see `AttentionSpec.projections`. A single one has the rows of these for each key head.
        gates: Those of strengths and decays, likewise.
        convolutions: Those of the taps of queries, keys and values, likewise.
        norm: That of the norm of outputs.
        output: That of the projection of outputs.
    """

    gate_rank: int | None = None
    module: str = "linear_attn"
    projections: tuple[str, ...]
    gates: tuple[str, ...]
    convolutions: tuple[str, ...] = ("conv1d",) * 3
    norm: str = "norm"
    output: str = "out_proj"

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        values, keys = self.heads * self.value_dim, self.heads * self.key_dim
        if self.gate_rank is None:
            return width * (self.mixed + 2 * values + 2 * self.heads)
        return width * (self.mixed + values + self.heads + 2 * self.gate_rank) + self.gate_rank * (keys + values)

    def over_devices(self, count: int) -> "DeltaSpec":
        """The same for several devices, which share out the key heads."""
        require_divisor(count, count, 1, "linear_num_key_heads", self.key_heads)
        return self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(HeadStates):
    """A selective scan: the gated delta rule without what a state has already. Files call a key head a group.

    Dao and Gu 2024, "Transformers are SSMs" (Mamba-2, arXiv:2405.21060).

    Attributes:
        name: What the names of all its tensors begin with.
        group_repeats: How many times the model has each key head of the checkpoint: see `over_devices`.
        has_bias: The convolution has a bias.
        steps: The smallest and the largest step of a token.
    """

    name: str
    group_repeats: int = 1
    has_bias: bool = True
    steps: tuple[float, float] = (0.0, float("inf"))

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        return width * (self.mixed + 2 * self.heads * self.value_dim + self.heads)

    def over_devices(self, count: int) -> "MambaSpec":
        """The same for several devices, which share out the groups. A single group is repeated for each of them."""
        repeats = count if self.key_heads == 1 else 1
        require_divisor(count, count, 1, "the groups of heads of Mamba layers", self.key_heads * repeats)
        require_divisor(count, count, 1, "the heads of Mamba layers", self.heads)
        return dataclasses.replace(self, key_heads=self.key_heads * repeats, group_repeats=repeats)


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
