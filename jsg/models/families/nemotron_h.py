"""Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a Mamba-2, attention without rope, a block, or experts.

Blocks have no gates, but the square of ReLU.

A step is within `time_step_limit`, in prompts and in answers, as in the publisher's own code: 0 to infinity in all
files, as vLLM has it. transformers 5.23 has at least `time_step_min`, 0.001, in prompts and nothing in answers. That
field is about the first values of a training, and as a bound it costs quality (transformers #48989, mlx-lm #1026).
"""

import dataclasses
from typing import Any

from jsg.models.block_spec import FeedForwardSpec, LatentExpertsSpec, NoMixer
from jsg.models.families import glm4_moe
from jsg.models.families.granitemoehybrid import KINDS, read_mamba
from jsg.models.family import PLAIN, usual
from jsg.models.parts import FULL, LINEAR, MAX_LAYERS, MLP, is_on, read_heads
from jsg.models.spec import Mixer, ModelSpec
from jsg.sources import Fields

BLOCK, EXPERTS = "mlp", "moe"
KINDS_FIELD = "layers_block_type"
LETTERS = {"M": LINEAR, "*": FULL, "-": BLOCK, "E": EXPERTS}
"""Of `hybrid_override_pattern`."""
NAMES = KINDS | {BLOCK: BLOCK, EXPERTS: EXPERTS}
FIELDS = "n_groups mamba_num_heads ssm_state_size mamba_head_dim conv_kernel use_conv_bias layer_norm_epsilon"
PREFIXES = {"embeddings.": "model.embed_tokens.", "norm_f.": "model.norm.", "layers.": "model.layers."}
OUTER = ("", "backbone.", "model.")


def kinds(config: Fields) -> list[str]:
    """The kind of each layer. How many there are is not asked of another field."""
    field, known = KINDS_FIELD, NAMES
    if config.get(field) is None:
        field, known = "hybrid_override_pattern", LETTERS
    named = config.get(field)
    ok = isinstance(named, list if known is NAMES else str) and 0 < len(named) <= MAX_LAYERS
    ok = ok and all(isinstance(kind, str) and kind in known for kind in named) and FULL in map(known.get, named)
    config.require(ok, field, f"be made of {', '.join(known)}, with attention in at least one layer", named)
    if config.get("num_hidden_layers") not in (None, len(named)):
        config.notes.append(f"num_hidden_layers has no effect, for {field} names {len(named)} layers")
    return [known[kind] for kind in named]


def attention(config: Fields) -> dict[str, Mixer]:
    """The mixer of each kind of layer."""
    projections = tuple(f"mixer.{name}_proj" for name in "qkv")
    return {
        LINEAR: read_mamba(config, "mixer", FIELDS),
        FULL: read_heads(config, projections=projections, output="mixer.o_proj"),
        BLOCK: NoMixer(),
        EXPERTS: NoMixer(),
    }


def mlp(config: Fields) -> list[MLP | None]:
    """The feed-forward block of each layer that is one."""
    of_layers, has_bias = kinds(config), is_on(config, "mlp_bias")

    def tensors(name: str) -> dict[str, Any]:
        return {"gate": None, "up": f"{name}.up_proj", "down": f"{name}.down_proj", "activation": "relu2"}

    def block(inner_field: str, name: str) -> FeedForwardSpec:
        return FeedForwardSpec(inner=config.integer(inner_field), has_bias=has_bias, **tensors(name))

    blocks: dict[str, MLP] = {BLOCK: block("intermediate_size", "mixer")}
    if EXPERTS in of_layers:
        latent = None
        if config.get("moe_latent_size") is not None:
            narrow = config.integer("moe_latent_size")
            projections = ("mixer.fc1_latent_proj", "mixer.fc2_latent_proj")
            latent = LatentExpertsSpec(width=narrow, into=projections[0], out=projections[1], has_bias=has_bias)
        router = {"name": "mixer.gate", "choice_bias": "mixer.gate.e_score_correction_bias", "rounds_weights": False}
        blocks[EXPERTS] = glm4_moe.read_grouped(
            config,
            choice={"score": "sigmoid"},
            router=router,
            latent=latent,
            shared=block("moe_shared_expert_intermediate_size", "mixer.shared_experts"),
            **tensors("mixer.experts.{expert}"),
        )
    return [blocks.get(kind) for kind in of_layers]


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """One norm in each layer, and the names of tensors."""
    layers = tuple(
        dataclasses.replace(layer, **({"before_mlp": None} if layer.mlp is None else {"before_attention": None}))
        for layer in plain.layers
    )
    prefixes = {outer + inner: here for outer in OUTER for inner, here in PREFIXES.items()}
    return dataclasses.replace(plain, layers=layers, names=dataclasses.replace(plain.names, prefixes=prefixes))


FAMILY = PLAIN.variant(
    model_type="nemotron_h",
    defaults=usual(
        vocab=131072, inner=21504, layers=None, kv_heads=8, head_dim=128, context=4096, expert_inner=7688, per_token=2
    )
    | {
        "layers_block_type": None,
        "hybrid_override_pattern": "ME*-",
        "layer_norm_epsilon": 1e-5,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "time_step_limit": [0.0, float("inf")],
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_shared_expert_intermediate_size": 7688,
        "moe_latent_size": None,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
    },
    without="rope_theta rms_norm_eps hidden_act",
    only={
        "mamba_hidden_act": "silu",
        "mlp_hidden_act": "relu2",
        "mamba_ssm_cache_dtype": "float32",
        "residual_in_fp32": False,
        "sliding_window": None,
        "use_bias": False,
    },
    ignored="chunk_size expand hidden_act mamba_chunk_size mamba_dt_init_floor mamba_dt_max mamba_dt_min mamba_expand "
    "mamba_proj_bias moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type norm_eps "
    "num_logits_to_keep num_nextn_predict_layers num_query_groups rescale_prenorm_residual rms_norm_eps "
    "rope_theta time_step_floor time_step_max time_step_min time_step_rank use_mamba_kernels",
    aliases={
        "attention_head_dim": "head_dim",  # of the first published files
        "layer_types": "layers_block_type",
        "mamba_conv_bias": "use_conv_bias",
        "mamba_d_conv": "conv_kernel",
        "mamba_dt_limit": "time_step_limit",
        "mamba_n_groups": "n_groups",
        "num_local_experts": "n_routed_experts",
    },
    attention=attention,
    kinds=kinds,
    mlp=mlp,
    norms={"before_attention": "norm", "before_mlp": "norm"},
    norm={"eps_field": "layer_norm_epsilon", "is_wide": True},
    scales_context=False,
    model=model,
    unread=r"mtp\..*",
)
