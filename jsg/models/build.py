"""Builds the modules of a model."""

import jax
from flax import nnx

from jsg.models.clip import VisionTower
from jsg.models.decoder import Decoder
from jsg.models.llava import Llava
from jsg.models.spec import ModelSpec


def build_model(spec: ModelSpec, dtype: jax.typing.DTypeLike) -> nnx.Module:
    """The model, with its vision tower if it has one, of zeros; under `nnx.eval_shape` of shapes."""
    text = Decoder(spec, dtype)
    return text if spec.vision is None else Llava(text, VisionTower(spec.vision, spec.hidden_size, dtype))
