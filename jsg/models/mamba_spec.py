"""Linear attention by a selective scan, as a record. No JAX.

Dao and Gu 2024, "Transformers are SSMs" (Mamba-2, arXiv:2405.21060). Nothing is kept of a token: a request has a state.
"""

import dataclasses

from jsg.models.block_spec import require_divisor
from jsg.models.delta_spec import HeadStates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(HeadStates):
    """The gated delta rule without what a state has already. Files call a key head a group.

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
