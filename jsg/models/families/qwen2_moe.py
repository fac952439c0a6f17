"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): Qwen2 with experts, and a block that all tokens use beside them."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec, SharedExpertSpec
from jsg.models.families import qwen2
from jsg.models.family import Family
from jsg.models.parts import (
    MAX_LAYERS,
    SLIDING,
    num_layers,
    read_attention,
    read_experts,
    read_feed_forward,
    read_layer,
    read_layer_types,
)
from jsg.models.spec import ModelSpec

EXPERTS = {
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
}
"""The fields of experts in the files of Qwen."""


def spec(config: Fields) -> ModelSpec:
    """The model of a file."""
    attention = dataclasses.replace(read_attention(config), qkv_bias=config.flag("qkv_bias", default=True))
    layers = [
        read_layer(config, dataclasses.replace(attention, window=window), mlp)
        for window, mlp in zip(_windows(config), blocks(config, shared(config)), strict=True)
    ]
    return qwen2.read_qwen(config, layers)


def shared(config: Fields) -> SharedExpertSpec:
    """The block that all tokens use, times a sigmoid."""
    return SharedExpertSpec(
        block=FeedForwardSpec(
            inner=config.integer("shared_expert_intermediate_size"),
            gate="mlp.shared_expert.gate_proj",
            up="mlp.shared_expert.up_proj",
            down="mlp.shared_expert.down_proj",
        ),
        gate="mlp.shared_expert_gate",
    )


def blocks(config: Fields, beside: SharedExpertSpec | None) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer. The file says which have experts; the others are of another width."""
    count, dense = num_layers(config), read_feed_forward(config)
    experts = dataclasses.replace(read_experts(config, "num_experts", "moe_intermediate_size"), shared=beside)
    is_renormed = config.flag("norm_topk_prob", default=False)
    choice = dataclasses.replace(experts.router.choice, is_renormed=is_renormed)
    experts = dataclasses.replace(experts, router=dataclasses.replace(experts.router, choice=choice))
    step, whole = config.integer("decoder_sparse_step", high=MAX_LAYERS), config.get("mlp_only_layers", [])
    ok = isinstance(whole, list) and all(type(layer) is int and 0 <= layer < count for layer in whole)
    config.require(ok, "mlp_only_layers", f"be numbers of layers from 0 to {count - 1}", whole)
    return [dense if layer in whole or (layer + 1) % step else experts for layer in range(count)]


def _windows(config: Fields) -> list[int | None]:
    """As Qwen2's, but `max_window_layers` counts the first layers, and every other one of them has a window."""
    if read_layer_types(config) is not None or not config.flag("use_sliding_window", default=False):
        return qwen2.windows(config)
    num_windows = config.integer("max_window_layers", low=0)
    kinds = ["full_attention" if layer % 2 or layer >= num_windows else SLIDING for layer in range(num_layers(config))]
    return qwen2.windows(config.under({"layer_types": kinds}))


FAMILY = Family(
    architecture="Qwen2MoeForCausalLM",
    model_type="qwen2_moe",
    defaults=qwen2.DEFAULTS
    | EXPERTS
    | {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "shared_expert_intermediate_size": 5632,
        "qkv_bias": True,
    },
    spec=spec,
)
