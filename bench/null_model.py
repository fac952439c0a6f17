"""A model that computes nothing, so that the cost of a step beside the model can be measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from bench.shapes import LLAMA_100M
from jsg.cache.pool import KVPool
from jsg.models import llava
from jsg.models.inputs import ForwardInputs
from jsg.models.registry import FAMILIES
from jsg.models.spec import ModelSpec

ARCHITECTURE = "NullForBench"
SHAPE: dict[str, Any] = LLAMA_100M | {
    "architectures": [ARCHITECTURE],
    "vocab_size": 64,
    "hidden_size": 2,
    "intermediate_size": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 2,
}


class NullModel(nnx.Module):
    """Implements `jsg.models.model.Model` with constants."""

    def __init__(self, spec: ModelSpec, dtype: jax.typing.DTypeLike):
        self.spec = spec

    def __call__(self, inputs: ForwardInputs, pool: KVPool) -> tuple[Float[Array, "T D"], KVPool]:
        state = jnp.linspace(-1.0, 1.0, self.spec.hidden_size)  # vectors of zeros would be short as JSON
        return jnp.broadcast_to(state, (len(inputs.token_ids), self.spec.hidden_size)), pool

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        return jnp.zeros((len(hidden), self.spec.vocab_size))


@contextmanager
def registered() -> Iterator[None]:
    """Makes `ARCHITECTURE` a known family inside the `with`."""
    family = FAMILIES["LlamaForCausalLM"]
    with (
        mock.patch.object(llava, "Decoder", NullModel),
        mock.patch.dict(FAMILIES, {ARCHITECTURE: family}),
    ):
        yield
