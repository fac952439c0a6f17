"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows that a switch turns on."""

import dataclasses
from collections.abc import Iterable

from jsg.fields import Fields
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import (
    SLIDING,
    num_layers,
    read_attention,
    read_feed_forward,
    read_layer,
    read_layer_types,
    read_model,
    read_window,
    with_windows,
)
from jsg.models.rope_fields import MAX_CONTEXT_LEN
from jsg.models.spec import LayerSpec, ModelSpec
from jsg.window import Window

DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "dual_chunk_attention_config": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def spec(config: Fields) -> ModelSpec:
    """The projections have their biases whatever the file says."""
    attention = dataclasses.replace(read_attention(config), qkv_bias=True)
    layer = read_layer(config, attention, read_feed_forward(config))
    return read_qwen(config, with_windows(layer, windows(config)))


def read_qwen(config: Fields, layers: Iterable[LayerSpec]) -> ModelSpec:
    """A model of these layers, with the context in which dual chunk attention (arXiv:2402.17463) is plain attention."""
    model, chunks = read_model(config, layers), config.section("dual_chunk_attention_config")
    if chunks is None:
        return model
    context_len, chunk_len = model.max_position_embeddings, chunks.integer("chunk_size", high=MAX_CONTEXT_LEN)
    chunk_len -= chunks.integer("local_size", high=chunk_len - 1)
    if chunk_len < context_len:
        config.notes.append(f"the context is {chunk_len} tokens of {context_len}, without dual_chunk_attention_config")
    return dataclasses.replace(model, max_position_embeddings=min(context_len, chunk_len))


def windows(config: Fields) -> list[Window | None]:
    """The window of each layer, if the switch is on: of those that `layer_types` names, or else of the last layers."""
    kinds, count = read_layer_types(config), num_layers(config)
    if config.get("sliding_window") is None or not config.flag("use_sliding_window", default=False):
        config.require(SLIDING not in (kinds or ()), "layer_types", "name no sliding_attention without a window", kinds)
        return [None] * count
    window = read_window(config)
    if kinds is not None:
        return [window if kind == SLIDING else None for kind in kinds]
    num_whole = config.integer("max_window_layers", low=0)
    return [window if layer >= num_whole else None for layer in range(count)]


FAMILY = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", defaults=DEFAULTS, spec=spec)
