"""Mistral: Llama without biases, with one window for all layers or none."""

from jsg.fields import Fields
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import (
    num_layers,
    read_attention,
    read_feed_forward,
    read_layer,
    read_model,
    read_window,
    with_windows,
)
from jsg.models.spec import ModelSpec
from jsg.window import Window

DEFAULTS = llama.DEFAULTS | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def spec(config: Fields) -> ModelSpec:
    """The model of a file."""
    layer = read_layer(config, read_attention(config), read_feed_forward(config))
    return read_model(config, with_windows(layer, windows(config)))


def windows(config: Fields) -> list[Window | None]:
    """The window of each layer, all of them alike. Qwen's switch, which some files have, has no effect."""
    window = None if config.get("sliding_window") is None else read_window(config)
    if window is not None and config.get("use_sliding_window") is not None:
        config.notes.append("config.json has use_sliding_window, but this family has no such switch")
    return [window] * num_layers(config)


FAMILY = Family(
    architecture="MistralForCausalLM",
    model_type="mistral",
    defaults=DEFAULTS,
    spec=spec,
    ignored=frozenset({"use_sliding_window"}),
)
