"""OLMo 2: Llama with norms of what blocks add, not of what they read, and of all heads together."""

import dataclasses
from collections.abc import Iterable

from jsg.fields import Fields
from jsg.models.block_spec import AttentionSpec, NormSpec, QueryKeyNormSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import num_layers, read_attention, read_eps, read_feed_forward, read_heads, read_model, read_norm
from jsg.models.spec import LayerSpec, ModelSpec


def spec(config: Fields) -> ModelSpec:
    """The model of a file."""
    return read_olmo(config, [normed(config, read_attention(config))] * num_layers(config))


def normed(config: Fields, attention: AttentionSpec) -> AttentionSpec:
    """Attention with norms of all heads. `attention_bias` means all four projections."""
    has_bias = config.flag("attention_bias", default=False)
    norm = QueryKeyNormSpec(eps=read_eps(config), spans_heads=True)
    return dataclasses.replace(attention, qk_norm=norm, qkv_bias=has_bias, output_bias=has_bias)


def read_olmo(config: Fields, layers: Iterable[AttentionSpec], *, scales_context: bool = True) -> ModelSpec:
    """A model whose layers have this attention, and norms that multiply in float32. See `read_model`."""
    layer = LayerSpec(
        attention=read_heads(config),
        after_attention=_wide(config, "post_attention_layernorm"),
        mlp=read_feed_forward(config),
        after_mlp=_wide(config, "post_feedforward_layernorm"),
    )
    whole = [dataclasses.replace(layer, attention=attention) for attention in layers]
    return read_model(config, whole, _wide(config, "model.norm"), scales_context=scales_context)


def _wide(config: Fields, name: str) -> NormSpec:
    return dataclasses.replace(read_norm(config, name), is_wide=True)


DEFAULTS = llama.DEFAULTS | {
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 50279,
}

FAMILY = Family(architecture="Olmo2ForCausalLM", model_type="olmo2", defaults=DEFAULTS, spec=spec)
