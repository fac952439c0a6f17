"""Qwen3-Next (80B-A3B): three layers of gated DeltaNet for one of attention, whose results have gates, and experts."""

import dataclasses
from functools import partial
from typing import Any

from jsg.models import parts
from jsg.models.families import qwen2, qwen2_moe
from jsg.models.family import usual
from jsg.models.spec import DraftSpec, Mixer, ModelSpec
from jsg.models.state_specs import DeltaSpec
from jsg.sources import Fields

GATED = tuple(f"self_attn.{name}_proj" for name in "qkvq")
KINDS = (parts.LINEAR, parts.FULL)
WIDE: dict[str, Any] = {"is_wide": True, "adds_one": True}
SECTIONS = frozenset({"mrope_section", "mrope_interleaved"})
"""How positions of pictures turn heads. Those of text are the same in all sections."""


def attention(config: Fields, projections: tuple[str, ...], gates: tuple[str, ...]) -> dict[str, Mixer]:
    """The attention of each kind of layer, and the tensors of projections to linear ones."""
    key_heads, heads = (config.integer(f"linear_num_{kind}_heads", high=parts.MAX_HEADS) for kind in ("key", "value"))
    config.require(heads % key_heads == 0, "linear_num_value_heads", f"be a multiple of {key_heads} key heads", heads)
    taps = config.integer("linear_conv_kernel_dim", high=parts.MAX_TAPS)
    config.require(taps > 1, "linear_conv_kernel_dim", "be above 1", taps)
    linear = DeltaSpec(
        key_heads=key_heads,
        heads=heads,
        key_dim=config.integer("linear_key_head_dim", high=parts.MAX_HEAD_DIM),
        value_dim=config.integer("linear_value_head_dim", high=parts.MAX_HEAD_DIM),
        taps=taps,
        eps=parts.read_eps(config),
        projections=projections,
        gates=gates,
    )
    full: dict[str, Any] = {"is_partial": True, "own_rope_fields": SECTIONS, "bias": "attention_bias"}
    return {parts.FULL: parts.read_attention(config, **full, qk_norm=WIDE, projections=GATED), parts.LINEAR: linear}


def kinds(config: Fields) -> list[str]:
    """If the file does not say, every so-manyth layer is full."""
    every = config.integer("full_attention_interval", high=parts.MAX_LAYERS)
    unnamed = [parts.LINEAR if layer % every else parts.FULL for layer in range(1, parts.num_layers(config) + 1)]
    return parts.read_list(config, "layer_types", KINDS, absent=unnamed, needed=parts.FULL)


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """A full layer drafts, with the embedding and the head of the model."""
    has_own = parts.is_on(config, "mtp_use_dedicated_embeddings")
    if has_own or config.integer("mtp_num_hidden_layers", low=0, high=parts.MAX_LAYERS) != 1:
        return plain
    names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    embedding, hidden, final = (parts.read_norm(config, name, **WIDE) for name in names)
    draft = DraftSpec(
        prefix="mtp",
        block="layers.0",
        layer=next(layer for layer in reversed(plain.layers) if layer.attention.kv_shape is not None),
        joined="fc",
        embedding_norm=embedding,
        hidden_norm=hidden,
        final_norm=final,
        repeats_normed=True,
    )
    return dataclasses.replace(plain, draft=draft)


FAMILY = qwen2.FAMILY.variant(
    model_type="qwen3_next",
    defaults=qwen2_moe.EXPERTS
    | usual(width=2048, inner=5632, layers=48, heads=16, kv_heads=2, head_dim=256, expert_inner=512, per_token=10)
    | {
        "partial_rotary_factor": 0.25,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "norm_topk_prob": True,
        "mtp_num_hidden_layers": 0,
        "mtp_use_dedicated_embeddings": False,
    },
    without="use_sliding_window sliding_window max_window_layers dual_chunk_attention_config",
    attention=partial(attention, projections=("in_proj_qkvz",), gates=("in_proj_ba",)),
    kinds=kinds,
    mlp=qwen2_moe.mlp,
    norm=WIDE,
    model=model,
    unread=r"mtp\..*",
)
