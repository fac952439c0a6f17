"""SmolLM3: Llama without rope in every fourth layer."""

import dataclasses

from jsg.fields import Fields
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import (
    MAX_LAYERS,
    SLIDING,
    num_layers,
    read_attention,
    read_feed_forward,
    read_layer,
    read_layer_types,
    read_model,
    read_window,
)
from jsg.models.spec import ModelSpec
from jsg.window import Window


def spec(config: Fields) -> ModelSpec:
    """`attention_bias` means all four projections of attention."""
    has_bias = config.flag("attention_bias", default=False)
    attention = dataclasses.replace(read_attention(config), qkv_bias=has_bias, output_bias=has_bias)
    mlp = dataclasses.replace(read_feed_forward(config), has_bias=config.flag("mlp_bias", default=False))
    ropes = _ropes(config)
    layers = [
        dataclasses.replace(attention, rope=attention.rope if has_rope else None, window=window)
        for has_rope, window in zip(ropes, _windows(config, ropes), strict=True)
    ]
    return read_model(config, [read_layer(config, layer, mlp) for layer in layers])


def _ropes(config: Fields) -> list[bool]:
    """Whether each layer has rope: where `no_rope_layers` has a 1."""
    count, named = num_layers(config), config.get("no_rope_layers")
    interval = config.integer("no_rope_layer_interval", high=MAX_LAYERS)
    if named is None:
        return [(layer + 1) % interval != 0 for layer in range(count)]
    ok = isinstance(named, list) and len(named) == count and all(value in (0, 1) for value in named)
    config.require(ok, "no_rope_layers", f"be {count} times 0 or 1", named)
    return [bool(value) for value in named]


def _windows(config: Fields, ropes: list[bool]) -> list[Window | None]:
    """The window of each layer, if the switch is on: of those that `layer_types` names, or else that have no rope."""
    kinds = read_layer_types(config)
    if config.get("sliding_window") is None or not config.flag("use_sliding_window", default=False):
        config.require(SLIDING not in (kinds or ()), "layer_types", "name no sliding_attention without a window", kinds)
        return [None] * len(ropes)
    window = read_window(config)
    has_window = [not has_rope for has_rope in ropes] if kinds is None else [kind == SLIDING for kind in kinds]
    return [window if has else None for has in has_window]


FAMILY = Family(
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "rope_theta": 2_000_000.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "no_rope_layers": None,
        "no_rope_layer_interval": 4,
        "layer_types": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    spec=spec,
    ignored=frozenset({"max_window_layers"}),
)
