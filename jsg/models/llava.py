"""LLaVA: a text model that sees images. Rows of the vision tower take the place of token embeddings."""

from typing import cast

import jax
from flax import nnx
from jaxtyping import Array, Float

from jsg.cache.pool import KVPool
from jsg.models.clip import VisionTower
from jsg.models.decoder import Decoder
from jsg.models.inputs import ForwardInputs
from jsg.models.model import Model
from jsg.models.spec import ModelSpec


class Llava(nnx.Module):
    """The text model and its tower. Implements `jsg.models.model.Model` by the text model.

    Image tokens are the ids of `ForwardInputs` from the vocabulary's size on. Their rows come from `vision.encode`.
    """

    def __init__(self, text: nnx.Module, vision: VisionTower):
        """Takes the text model, which is a `Model`, and a tower whose rows have the model's width."""
        self.text = cast(Model, text)
        self.vision = vision

    def __call__(self, inputs: ForwardInputs, pool: KVPool) -> tuple[Float[Array, "T D"], KVPool]:
        """See `Model`."""
        return self.text(inputs, pool)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """See `Model`."""
        return self.text.logits(hidden)


def build_model(spec: ModelSpec, dtype: jax.typing.DTypeLike) -> nnx.Module:
    """The model, with its vision tower if it has one, of zeros; under `nnx.eval_shape` of shapes."""
    text = Decoder(spec, dtype)
    return text if spec.vision is None else Llava(text, VisionTower(spec.vision, spec.hidden_size, dtype))
