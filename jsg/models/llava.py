"""LLaVA: a text model that is shown images. The vision tower makes rows, which take the place of token embeddings."""

from typing import cast

from flax import nnx
from jaxtyping import Array, Float

from jsg.cache.pool import KVPool
from jsg.models.clip import VisionTower
from jsg.models.inputs import ForwardInputs
from jsg.models.model import Model

_PREFIXES = {
    "vision_tower.vision_model.": "vision_tower.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.vision_tower.vision_model.": "vision_tower.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.image_newline": "image_newline",
}
"""How transformers 4 (the first three) and transformers 5 name what is in a checkpoint → how the modules here do: the
text half as if it stood alone, and the tower without the class it is wrapped in."""


class Llava(nnx.Module):
    """The text model and its tower. Implements `jsg.models.model.Model` by the former.

    Image tokens are those of `ForwardInputs` from the vocabulary's size on; their rows come from `vision.encode`.
    """

    def __init__(self, text: nnx.Module, vision: VisionTower):
        """Takes the text model, a `Model`, and the tower whose rows have its width."""
        self.text = cast(Model, text)
        self.vision = vision

    def __call__(self, inputs: ForwardInputs, pool: KVPool) -> tuple[Float[Array, "T D"], KVPool]:
        """See `Model`."""
        return self.text(inputs, pool)

    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """See `Model`."""
        return self.text.logits(hidden)


def module_name(name: str) -> str:
    """The name that a tensor of a LLaVA checkpoint has in the modules here."""
    prefix = max((prefix for prefix in _PREFIXES if name.startswith(prefix)), key=len, default=None)
    return name if prefix is None else _PREFIXES[prefix] + name.removeprefix(prefix)
