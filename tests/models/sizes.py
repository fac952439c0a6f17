"""How large a model is."""

import jax.numpy as jnp

from jsg.models.loading import _parameters, abstract_model
from jsg.models.spec import ModelSpec


def num_parameters(config: ModelSpec) -> int:
    """How many numbers the checkpoint of this model holds."""
    return sum(param.size for param in _parameters(abstract_model(config, jnp.float32)))
