"""Linear attention by a selective scan, as a record. No JAX.

Dao and Gu 2024, "Transformers are SSMs" (Mamba-2, arXiv:2405.21060). Nothing is kept of a token: a request has a state.
"""

import dataclasses

from jsg.models.block_spec import StateMixer, StateShape, require_divisor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(StateMixer):
    """The gated delta rule without what a state has already, so that a token adds its value, whatever the state.

    Attributes:
        name: What the names of all its tensors begin with.
        groups: Groups of heads, which share a query and a key.
        group_repeats: How many times the model has each group of the checkpoint: see `over_devices`.
        heads: Heads of values, each with a state; a multiple of `groups`.
        key_dim: Width of a query and key.
        value_dim: Width of a value.
        taps: How many tokens the convolution sees, with the newest.
        has_bias: The convolution has a bias.
        eps: What the norm of a group's outputs adds to the mean square.
        steps: The smallest and the largest step of a token.
    """

    name: str
    groups: int
    group_repeats: int = 1
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    has_bias: bool = True
    eps: float
    steps: tuple[float, float] = (0.0, float("inf"))

    @property
    def mixed(self) -> int:
        """Channels of the convolution."""
        return 2 * self.groups * self.key_dim + self.heads * self.value_dim

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """What the layer keeps of a request: the last inputs of the convolution, and a matrix for each head."""
        inputs = (self.taps, self.groups, self.mixed // self.groups)
        return StateShape(inputs, 1), StateShape((self.heads, self.value_dim, self.key_dim), 0, "float32")

    def num_weights(self, width: int) -> int:
        """The numbers of the kernels, in a model of this width."""
        return width * (self.mixed + 2 * self.heads * self.value_dim + self.heads)

    def over_devices(self, count: int) -> "MambaSpec":
        """The same for several devices, which share out the groups. A single group is repeated for each of them."""
        repeats = count if self.groups == 1 else 1
        require_divisor(count, count, 1, "the groups of heads of Mamba layers", self.groups * repeats)
        require_divisor(count, count, 1, "the heads of Mamba layers", self.heads)
        return dataclasses.replace(self, groups=self.groups * repeats, group_repeats=repeats)
