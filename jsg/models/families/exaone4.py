"""EXAONE 4 (1.2B, 32B): norms of what blocks add and of each head, and rope in layers with a window only."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import QueryKeyNormSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    num_layers,
    of_kinds,
    read_attention,
    read_eps,
    read_feed_forward,
    read_layer_kinds,
    read_layer_types,
    read_model,
    read_norm,
)
from jsg.models.spec import LayerSpec, ModelSpec


def spec(config: Fields) -> ModelSpec:
    """A model without windows has rope in all layers."""
    attention = dataclasses.replace(read_attention(config), qk_norm=QueryKeyNormSpec(eps=read_eps(config)))
    has_windows = config.get("sliding_window") is not None
    ropes = {SLIDING: attention.rope, FULL: None if has_windows else attention.rope}
    norms = [read_norm(config, name) for name in ("post_attention_layernorm", "post_feedforward_layernorm")]
    mlp = read_feed_forward(config)
    layers = [
        LayerSpec(attention=each, after_attention=norms[0], mlp=mlp, after_mlp=norms[1])
        for each in of_kinds(config, _kinds(config, has_windows=has_windows), attention, ropes)
    ]
    return read_model(config, layers)


def _kinds(config: Fields, *, has_windows: bool) -> list[str]:
    """The kind of each layer. Files that name kinds may have a pattern of letters, such as LLLG."""
    kinds = read_layer_types(config)
    if kinds is None and has_windows:
        return read_layer_kinds(config, config.integer("sliding_window_pattern", high=MAX_LAYERS))
    return kinds or [FULL] * num_layers(config)


FAMILY = Family(
    architecture="Exaone4ForCausalLM",
    model_type="exaone4",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 102400,
        "intermediate_size": 16384,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
        "bos_token_id": 0,
    },
    spec=spec,
)
