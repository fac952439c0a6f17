"""Ministral 8B: Mistral with a window in the layers that `layer_types` names, or in all of them."""

from jsg.models.families import mistral
from jsg.models.parts import read_layer_types

FAMILY = mistral.FAMILY.variant(
    model_type="ministral",
    defaults={"layer_types": None},
    kinds=lambda config: read_layer_types(config) or mistral.kinds(config),
)
