"""Ministral 8B: Mistral with a window in the layers that `layer_types` names, or in all of them."""

from jsg.fields import Fields
from jsg.models.families import mistral
from jsg.models.family import Family
from jsg.models.parts import (
    SLIDING,
    read_attention,
    read_feed_forward,
    read_layer,
    read_layer_types,
    read_model,
    read_window,
    with_windows,
)
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """The model of a file."""
    layer = read_layer(config, read_attention(config), read_feed_forward(config))
    kinds = read_layer_types(config)
    if kinds is None:
        return read_model(config, with_windows(layer, mistral.windows(config)))
    window = read_window(config) if SLIDING in kinds else None
    return read_model(config, with_windows(layer, (window if kind == SLIDING else None for kind in kinds)))


FAMILY = Family(
    architecture="MinistralForCausalLM",
    model_type="ministral",
    defaults=mistral.DEFAULTS | {"layer_types": None},
    spec=spec,
    ignored=mistral.FAMILY.ignored,
)
