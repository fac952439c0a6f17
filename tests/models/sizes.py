"""How large a model is."""

import jax.numpy as jnp

from jsg.engine.dry_run import weight_bytes
from jsg.models.spec import ModelSpec


def num_parameters(config: ModelSpec) -> int:
    """How many numbers the checkpoint of this model holds. Layers that are alike are built once.

    In float32 all have four bytes; in other types some parameters stay float32.
    """
    return weight_bytes(config, jnp.dtype(jnp.float32), "none", 1, 1)[0] // 4
