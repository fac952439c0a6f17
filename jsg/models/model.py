"""The interface of a model to the engine, the same for every family."""

from typing import Protocol

from jaxtyping import Array, Float

from jsg.cache.pool import KVPool
from jsg.models.inputs import ForwardInputs


class Model(Protocol):
    """A decoder that keeps its keys and values in a paged pool. Methods run inside a trace and change nothing."""

    def __call__(self, inputs: ForwardInputs, pool: KVPool) -> tuple[Float[Array, "T D"], KVPool]:
        """The final hidden state of every packed token, normed, and the pool with the new keys and values."""
        ...

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Logits of hidden states, always in float32. Each of several devices has a slice of the columns."""
        ...
