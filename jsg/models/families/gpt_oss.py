"""gpt_oss (20B, 120B): sinks, a window in every other layer, and experts with biases and clamped gates."""

import dataclasses

from jsg.fields import Fields
from jsg.kernels_pallas.activation import ClampedGate
from jsg.models.block_spec import ExpertsSpec, NormSpec, StackSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import (
    SLIDING,
    num_layers,
    read_attention,
    read_experts,
    read_layer_types,
    read_model,
    read_norm,
    read_window,
    with_windows,
)
from jsg.models.spec import LayerSpec, ModelSpec
from jsg.window import Window


def spec(config: Fields) -> ModelSpec:
    """`attention_bias` means all four projections of attention. Norms multiply in float32."""
    has_bias = config.flag("attention_bias", default=True)
    layer = LayerSpec(
        before_attention=_wide(config, "input_layernorm"),
        attention=dataclasses.replace(
            read_attention(config), qkv_bias=has_bias, output_bias=has_bias, sinks="self_attn.sinks"
        ),
        before_mlp=_wide(config, "post_attention_layernorm"),
        mlp=_experts(config),
    )
    model = read_model(config, with_windows(layer, _windows(config)))
    return dataclasses.replace(model, final_norm=_wide(config, "model.norm"))


def _wide(config: Fields, name: str) -> NormSpec:
    return dataclasses.replace(read_norm(config, name), is_wide=True)


def _experts(config: Fields) -> ExpertsSpec:
    """One tensor has all experts, with their gates in the even columns."""
    experts = read_experts(config, "num_local_experts", "intermediate_size")
    gate = ClampedGate(limit=config.number("swiglu_limit"), slope=config.number("swiglu_alpha"))
    return dataclasses.replace(
        experts,
        router=dataclasses.replace(experts.router, name="mlp.router", has_bias=True),
        activation=gate,
        gate="mlp.experts.gate_up_proj",
        up="mlp.experts.gate_up_proj",
        down="mlp.experts.down_proj",
        stack=StackSpec(is_transposed=True, is_interleaved=True, suffix="", bias_suffix="_bias"),
        has_bias=True,
    )


def _windows(config: Fields) -> list[Window | None]:
    """By `layer_types`; without it every other layer has a window, from the first on."""
    count = num_layers(config)
    kinds = read_layer_types(config) or [SLIDING, "full_attention"] * ((count + 1) // 2)
    return [read_window(config) if kind == SLIDING else None for kind in kinds[:count]]


FAMILY = Family(
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "bos_token_id": None,
        "eos_token_id": None,
        "attention_bias": True,
        "layer_types": None,
        "sliding_window": 128,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    spec=spec,
    ignored=frozenset({"experts_per_token", "initial_context_length"}),
    aliases={"num_experts": "num_local_experts"},
)
