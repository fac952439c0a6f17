"""Gemma 2 (2B, 9B, 27B): four norms in a layer, windows in every other layer, and bounds of scores and logits."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from jsg.fields import Fields
from jsg.models.block_spec import AttentionSpec, FeedForwardSpec, NormSpec, RopeSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import (
    LAYER_KINDS,
    of_kinds,
    read_heads,
    read_layer_kinds,
    read_model,
    read_norm,
)
from jsg.models.rope_fields import read_rope
from jsg.models.spec import LayerSpec, ModelSpec

DEFAULTS: dict[str, Any] = {name: value for name, value in llama.DEFAULTS.items() if name != "hidden_act"} | {
    "vocab_size": 256000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "attention_bias": False,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""Those of Gemma 3 too."""


def spec(config: Fields) -> ModelSpec:
    """The model of a file."""
    attention = dataclasses.replace(heads(config), softcap=_cap(config, "attn_logit_softcapping"))
    rope = read_rope(config, head_dim=attention.head_dim)
    ropes: dict[str, RopeSpec | None] = dict.fromkeys(LAYER_KINDS, rope)
    return read_gemma(config, of_kinds(config, read_layer_kinds(config, full_every=2), attention, ropes))


def heads(config: Fields) -> AttentionSpec:
    """Attention, whose scale the file says. `attention_bias` means all four projections."""
    is_two_way = config.get("use_bidirectional_attention", False)
    config.require(not is_two_way, "use_bidirectional_attention", "be false: attention must be causal", is_two_way)
    has_bias, scale = config.flag("attention_bias", default=False), config.number("query_pre_attn_scalar") ** -0.5
    return dataclasses.replace(read_heads(config), scale=scale, qkv_bias=has_bias, output_bias=has_bias)


def read_gemma(
    config: Fields, layers: Iterable[AttentionSpec], *, scales_context: bool = True, adds_one: bool = True
) -> ModelSpec:
    """A model whose layers have this attention. `scales_context`: see `read_model`; `adds_one`: see `NormSpec`."""

    def norm(name: str) -> NormSpec:
        return dataclasses.replace(read_norm(config, name), is_wide=True, adds_one=adds_one)

    activation = config.get("hidden_activation")
    is_gelu = activation == "gelu_pytorch_tanh"
    config.require(is_gelu, "hidden_activation", "be gelu_pytorch_tanh, the only supported activation", activation)
    mlp = FeedForwardSpec(inner=config.integer("intermediate_size"), activation="gelu_tanh")
    whole = [
        LayerSpec(
            before_attention=norm("input_layernorm"),
            attention=attention,
            after_attention=norm("post_attention_layernorm"),
            before_mlp=norm("pre_feedforward_layernorm"),
            mlp=mlp,
            after_mlp=norm("post_feedforward_layernorm"),
        )
        for attention in layers
    ]
    return dataclasses.replace(
        read_model(config, whole, scales_context=scales_context),
        final_norm=norm("model.norm"),
        embedding_factor=math.sqrt(config.integer("hidden_size")),
        logit_softcap=_cap(config, "final_logit_softcapping"),
    )


def _cap(config: Fields, name: str) -> float | None:
    """The bound of scores or logits; None for none."""
    return None if config.get(name) is None else config.number(name)


FAMILY = Family(
    architecture="Gemma2ForCausalLM",
    model_type="gemma2",
    defaults=DEFAULTS | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    spec=spec,
    ignored=frozenset({"hidden_act", "sliding_window_size"}),
)
