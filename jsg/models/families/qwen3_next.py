"""Qwen3-Next (80B-A3B): three layers of gated DeltaNet for one of attention, whose results have gates, and experts."""

import dataclasses
from collections.abc import Iterable

from jsg.fields import Fields
from jsg.models.block_spec import AttentionSpec, ExpertsSpec, FeedForwardSpec, NormSpec, QueryKeyNormSpec
from jsg.models.delta_spec import DeltaSpec
from jsg.models.families import qwen2, qwen2_moe
from jsg.models.family import Family
from jsg.models.parts import (
    FULL,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    num_layers,
    read_attention,
    read_eps,
    read_model,
    read_norm,
    with_unread,
)
from jsg.models.spec import LayerSpec, ModelSpec

LINEAR = "linear_attention"
SECTIONS = frozenset({"mrope_section", "mrope_interleaved"})
"""How positions of pictures turn heads. Those of text are the same in all sections."""
MAX_TAPS = 16


def spec(config: Fields) -> ModelSpec:
    """The rows of one tensor are those of a key head after those of another."""
    delta = read_delta(config, ("linear_attn.in_proj_qkvz",), ("linear_attn.in_proj_ba",))
    return read_hybrid(config, delta, qwen2_moe.blocks(config, qwen2_moe.shared(config)))


def read_delta(config: Fields, projections: tuple[str, ...], gates: tuple[str, ...]) -> DeltaSpec:
    """Linear attention whose projections are in these tensors."""
    key_heads, heads = (config.integer(f"linear_num_{kind}_heads", high=MAX_HEADS) for kind in ("key", "value"))
    config.require(heads % key_heads == 0, "linear_num_value_heads", f"be a multiple of {key_heads} key heads", heads)
    taps = config.integer("linear_conv_kernel_dim", high=MAX_TAPS)
    config.require(taps > 1, "linear_conv_kernel_dim", "be above 1", taps)
    return DeltaSpec(
        key_heads=key_heads,
        heads=heads,
        key_dim=config.integer("linear_key_head_dim", high=MAX_HEAD_DIM),
        value_dim=config.integer("linear_value_head_dim", high=MAX_HEAD_DIM),
        taps=taps,
        eps=read_eps(config),
        projections=projections,
        gates=gates,
    )


def read_hybrid(config: Fields, delta: DeltaSpec, blocks: Iterable[FeedForwardSpec | ExpertsSpec]) -> ModelSpec:
    """A model with these feed-forward blocks. What predicts later tokens, and what sees, is not read."""
    kinds = {FULL: _attention(config), LINEAR: delta}
    layers = [
        LayerSpec(
            before_attention=_norm(config, "input_layernorm"),
            attention=kinds[kind],
            before_mlp=_norm(config, "post_attention_layernorm"),
            mlp=mlp,
        )
        for kind, mlp in zip(_layer_kinds(config, tuple(kinds)), blocks, strict=True)
    ]
    model = read_model(config, layers, _norm(config, "model.norm"))
    return with_unread(model, r"mtp\..*")


def _attention(config: Fields) -> AttentionSpec:
    """`attention_bias` means all four projections."""
    has_bias = config.flag("attention_bias", default=False)
    return dataclasses.replace(
        read_attention(config, SECTIONS, is_partial=True),
        qk_norm=QueryKeyNormSpec(eps=read_eps(config), is_wide=True, adds_one=True),
        has_gate=True,
        qkv_bias=has_bias,
        output_bias=has_bias,
    )


def _norm(config: Fields, name: str) -> NormSpec:
    return dataclasses.replace(read_norm(config, name), is_wide=True, adds_one=True)


def _layer_kinds(config: Fields, known: tuple[str, ...]) -> list[str]:
    """The kind of each layer. If the file does not say, every so-manyth is full."""
    kinds, count = config.get("layer_types"), num_layers(config)
    every = config.integer("full_attention_interval", high=MAX_LAYERS)
    if kinds is None:
        kinds = [LINEAR if layer % every else FULL for layer in range(1, count + 1)]
    ok = isinstance(kinds, list) and len(kinds) == count and all(kind in known for kind in kinds) and FULL in kinds
    config.require(ok, "layer_types", f"be {count} of {' or '.join(known)}, at least one of them {FULL}", kinds)
    return kinds


DEFAULTS = {
    name: value
    for name, value in qwen2.DEFAULTS.items()
    if name not in ("use_sliding_window", "sliding_window", "max_window_layers", "dual_chunk_attention_config")
} | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
LATER = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
"""Fields of the layers that predict later tokens."""
EXPERTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
}

FAMILY = Family(
    architecture="Qwen3NextForCausalLM",
    model_type="qwen3_next",
    defaults=DEFAULTS | qwen2_moe.EXPERTS | EXPERTS | {"intermediate_size": 5632, "norm_topk_prob": True},
    spec=spec,
    ignored=LATER,
)
