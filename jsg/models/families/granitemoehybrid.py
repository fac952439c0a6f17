"""Granite 4: Granite with layers of Mamba-2, and a block that all tokens use, alone or beside experts."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import ExpertsSpec, FeedForwardSpec, SharedExpertSpec
from jsg.models.families import granite, granitemoe
from jsg.models.mamba_spec import MambaSpec
from jsg.models.parts import (
    FULL,
    LINEAR,
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_TAPS,
    is_on,
    num_layers,
    read_attention,
    read_eps,
    read_experts,
    read_heads,
    require_silu,
)
from jsg.models.spec import Mixer

KINDS = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}
"""What files call the kinds of layers → what transformers does."""
ROPES = ("rope", "nope")
FIELDS = "mamba_n_groups mamba_n_heads mamba_d_state mamba_d_head mamba_d_conv mamba_conv_bias rms_norm_eps"


def read_mamba(config: Fields, name: str, fields: str) -> MambaSpec:
    """A layer of Mamba-2, of fields with these names, in this order."""
    steps = config.get("time_step_limit")
    ok = isinstance(steps, list | tuple) and len(steps) == 2 and all(type(x) in (int, float) for x in steps)
    ok = ok and 0 <= steps[0] <= steps[1]
    config.require(ok, "time_step_limit", "be the smallest and the largest step, from 0 on", steps)
    of_groups, of_heads, key_dim, value_dim, taps, bias, eps = fields.split()
    groups, heads = (config.integer(each, high=MAX_HEADS) for each in (of_groups, of_heads))
    config.require(heads % groups == 0, of_groups, f"divide {heads} heads", groups)
    return MambaSpec(
        name=name,
        key_heads=groups,
        heads=heads,
        key_dim=config.integer(key_dim, high=MAX_HEAD_DIM),
        value_dim=config.integer(value_dim, high=MAX_HEAD_DIM),
        taps=config.integer(taps, low=2, high=MAX_TAPS),
        has_bias=is_on(config, bias),
        eps=read_eps(config, eps),
        steps=(float(steps[0]), float(steps[1])),
    )


def attention(config: Fields) -> dict[str, Mixer]:
    """The mixer of each kind of layer."""
    width = config.integer("mamba_expand") * config.integer("hidden_size")
    if config.get("mamba_d_head") == "auto":
        config = config.under({"mamba_d_head": width // config.integer("mamba_n_heads", high=MAX_HEADS)})
    mamba = read_mamba(config, "mamba", FIELDS)
    values = mamba.heads * mamba.value_dim
    config.require(values == width, "mamba_d_head", f"give {mamba.heads} heads {width} numbers", mamba.value_dim)
    rope = config.get("position_embedding_type")
    config.require(rope in (None, *ROPES), "position_embedding_type", f"be {' or '.join(ROPES)}", rope)
    read = read_attention if rope == ROPES[0] else read_heads
    return {FULL: read(config, bias="attention_bias", scale="attention_multiplier"), LINEAR: mamba}


def kinds(config: Fields) -> list[str]:
    """The kind of each layer. Without a list all would be of Mamba-2."""
    named, count = config.get("layer_types"), num_layers(config)
    ok = isinstance(named, list) and len(named) == count and all(kind in KINDS for kind in named)
    ok = ok and FULL in map(KINDS.get, named)
    config.require(ok, "layer_types", f"be {count} of mamba or attention, at least one of them attention", named)
    return [KINDS[kind] for kind in named]


def mlp(config: Fields) -> FeedForwardSpec | ExpertsSpec:
    """The block that all tokens use, beside experts if there are any."""
    require_silu(config)
    joint = "shared_mlp.input_linear"
    inner = config.integer("shared_intermediate_size")
    shared = FeedForwardSpec(inner=inner, gate=joint, up=joint, down="shared_mlp.output_linear")
    if not config.integer("num_local_experts", low=0, high=MAX_EXPERTS):
        return shared
    return dataclasses.replace(read_experts(config, **granitemoe.EXPERTS), shared=SharedExpertSpec(block=shared))


FAMILY = granite.FAMILY.variant(
    model_type="granitemoehybrid",
    defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
        "position_embedding_type": None,
        "layer_types": None,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_head": "auto",
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "time_step_limit": [0.0, float("inf")],
    },
    only={"mamba_proj_bias": False, "normalization_function": "rmsnorm"},
    without="mlp_bias",
    ignored="mamba_chunk_size init_method",
    aliases={"layers_block_type": "layer_types"},
    attention=attention,
    kinds=kinds,
    mlp=mlp,
)
