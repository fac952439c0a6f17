"""Kimi Linear (48B-A3B): layers of gated DeltaNet with a decay for each number of a key, and of latent attention.

The delta rule with such decays is KDA in Kimi Team 2025, "Kimi Linear" (arXiv:2510.26692).
"""

import dataclasses
from typing import Any

from jsg.models import parts
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec
from jsg.models.families import deepseek_v3, glm4_moe, glm4_moe_lite
from jsg.models.families.qwen3_next import KINDS
from jsg.models.family import usual
from jsg.models.spec import CAUSAL_PREFIXES, Mixer, ModelSpec
from jsg.models.state_specs import DeltaSpec
from jsg.models.without_effect import refuse_unknown
from jsg.sources import Fields

SECTION = "linear_attn_config"
SIZES = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
SIZES |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}
"""Fields of published files in their section → those that transformers writes."""
LAYERS = ("full_attn_layers", "kda_layers")
"""The layers of both kinds there. The first is 1."""
EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}


def attention(config: Fields) -> dict[str, Mixer]:
    """The attention of each kind of layer. No position turns anything."""
    if (own := config.section(SECTION)) is not None:
        refuse_unknown(own, {*SIZES, *LAYERS}, "Kimi Linear's linear attention")
        config = config.under({SIZES[name]: own.get(name) for name in own.names() & SIZES.keys()})
    heads, width = (
        config.integer("linear_num_heads", high=parts.MAX_HEADS),
        config.integer("linear_head_dim", high=parts.MAX_HEAD_DIM),
    )
    linear = DeltaSpec(
        key_heads=heads,
        heads=heads,
        key_dim=width,
        value_dim=width,
        taps=config.integer("linear_conv_kernel_dim", low=2, high=parts.MAX_TAPS),
        eps=parts.read_eps(config),
        gate_rank=width,
        module="self_attn",
        projections=("q_proj", "k_proj", "v_proj"),
        gates=("b_proj",),
        convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
        norm="o_norm",
        output="o_proj",
    )
    return {parts.FULL: deepseek_v3.attention(config, has_rope=False), parts.LINEAR: linear}


def kinds(config: Fields) -> list[str]:
    """If the file does not say, every fourth layer after the first is full."""
    count, own = parts.num_layers(config), config.section(SECTION)
    unnamed = [parts.LINEAR if layer % 4 or not layer else parts.FULL for layer in range(count)]
    if own is not None and own.names() & set(LAYERS):
        full, linear = lists = [own.get(name) for name in LAYERS]
        ok = all(isinstance(each, list) and all(type(layer) is int for layer in each) for each in lists)
        ok = ok and sorted(full + linear) == list(range(1, count + 1))
        config.require(ok, SECTION, f"have each layer from 1 to {count} in {' or '.join(LAYERS)}", lists)
        unnamed = [parts.FULL if layer in full else parts.LINEAR for layer in range(1, count + 1)]
    return parts.read_list(config, "layer_types", KINDS, absent=unnamed, needed=parts.FULL)


def mlp(config: Fields) -> list[FeedForwardSpec | ExpertsSpec]:
    """The feed-forward block of each layer, with the names of Mixtral's experts."""
    names: dict[str, Any] = {kind: f"mlp.experts.{{expert}}.{name}" for kind, name in EXPERTS.items()}
    return glm4_moe.mlp(config, **glm4_moe_lite.MLP, count_field="num_local_experts", **names)


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """In published files blocks with experts have a name of their own, and transformers gives it to all blocks."""
    prefixes = {
        f"{around}layers.{layer}.block_sparse_moe.": f"model.layers.{layer}.mlp."
        for layer in range(plain.num_layers)
        for around in ("", "model.")
    }
    return dataclasses.replace(plain, names=dataclasses.replace(plain.names, prefixes=CAUSAL_PREFIXES | prefixes))


FAMILY = deepseek_v3.FAMILY.variant(
    model_type="kimi_linear",
    only={"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "mla_use_nope": True}
    | {"tie_word_embeddings": False},
    defaults=usual(
        vocab=163840, width=2304, inner=9216, layers=27, heads=32, kv_heads=32, context=1048576, expert_inner=1024
    )
    | usual(eps=1e-5, bos=163584, eos=163586)
    | {
        "q_lora_rank": None,
        "num_local_experts": 256,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "mlp_layer_types": None,
        "routed_scaling_factor": 2.446,
        "layer_types": None,
        SECTION: None,
        "linear_head_dim": 128,
        "linear_num_heads": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts_per_tok": 8,
    },
    without="n_routed_experts rope_theta rope_interleave num_nextn_predict_layers",
    ignored="head_dim qk_head_dim rope_theta use_grouped_topk num_nextn_predict_layers",
    aliases={
        "model_max_length": "max_position_embeddings",
        "moe_renormalize": "norm_topk_prob",
        "num_expert_group": "n_group",
        "num_experts": "num_local_experts",
        "num_experts_per_token": "num_experts_per_tok",
        "num_shared_experts": "n_shared_experts",
    },
    attention=attention,
    kinds=kinds,
    mlp=mlp,
    model=model,
    later_layers=None,
)
