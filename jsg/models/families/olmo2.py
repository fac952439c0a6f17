"""OLMo 2: Llama with norms of what blocks add, not of what they read, and of all heads together."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import NormSpec, QueryKeyNormSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import num_layers, read_attention, read_eps, read_feed_forward, read_model, read_norm
from jsg.models.spec import LayerSpec, ModelSpec


def spec(config: Fields) -> ModelSpec:
    """`attention_bias` means all four projections of attention. Norms multiply in float32."""
    has_bias = config.flag("attention_bias", default=False)
    attention = dataclasses.replace(
        read_attention(config),
        qk_norm=QueryKeyNormSpec(eps=read_eps(config), spans_heads=True),
        qkv_bias=has_bias,
        output_bias=has_bias,
    )
    layer = LayerSpec(
        attention=attention,
        after_attention=_wide(config, "post_attention_layernorm"),
        mlp=read_feed_forward(config),
        after_mlp=_wide(config, "post_feedforward_layernorm"),
    )
    return read_model(config, [layer] * num_layers(config), _wide(config, "model.norm"))


def _wide(config: Fields, name: str) -> NormSpec:
    return dataclasses.replace(read_norm(config, name), is_wide=True)


FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 50279,
    },
    spec=spec,
)
