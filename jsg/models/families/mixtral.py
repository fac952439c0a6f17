"""Mixtral: Mistral with a feed-forward block of several experts."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import ExpertsSpec
from jsg.models.families import mistral
from jsg.models.family import Family
from jsg.models.parts import read_attention, read_experts, read_layer, read_model, with_windows
from jsg.models.spec import ModelSpec


def spec(config: Fields) -> ModelSpec:
    """The model of a file."""
    experts = named(read_experts(config, "num_local_experts", "intermediate_size"))
    layer = read_layer(config, read_attention(config), experts)
    return read_model(config, with_windows(layer, mistral.windows(config)))


def named(experts: ExpertsSpec) -> ExpertsSpec:
    """Experts with the names of Mixtral's tensors."""
    return dataclasses.replace(
        experts,
        router=dataclasses.replace(experts.router, name="block_sparse_moe.gate"),
        gate="block_sparse_moe.experts.{expert}.w1",
        up="block_sparse_moe.experts.{expert}.w3",
        down="block_sparse_moe.experts.{expert}.w2",
    )


FAMILY = Family(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    defaults=mistral.DEFAULTS
    | {
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    spec=spec,
    ignored=mistral.FAMILY.ignored,
    aliases={"num_experts": "num_local_experts"},
)
