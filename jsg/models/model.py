"""What the engine asks of a model, whatever its family."""

from typing import Protocol

from jaxtyping import Array, Float

from jsg.cache.pool import KVPool
from jsg.models.inputs import ForwardInputs


class Model(Protocol):
    """A decoder that keeps its keys and values in a paged pool. Its methods run inside a trace and change nothing."""

    def __call__(self, inputs: ForwardInputs, pool: KVPool) -> tuple[Float[Array, "T D"], KVPool]:
        """The final, normed hidden state of every packed token, and the pool with the new tokens' keys and values."""
        ...

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Logits of the given hidden states, always in float32. Of several devices each has a slice of the columns."""
        ...
