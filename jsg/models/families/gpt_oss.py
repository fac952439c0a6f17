"""gpt_oss (20B, 120B): sinks, a window in every other layer, and experts with biases and clamped gates."""

from jsg.kernels_pallas.activation import ClampedGate
from jsg.models.block_spec import ExpertsSpec, stacked
from jsg.models.family import PLAIN, usual
from jsg.models.parts import read_experts
from jsg.sources import Fields


def mlp(config: Fields) -> ExpertsSpec:
    """One tensor has all experts, with their gates in the even columns."""
    return read_experts(
        config,
        "num_local_experts",
        "intermediate_size",
        router={"name": "mlp.router", "has_bias": True},
        activation=ClampedGate(limit=config.number("swiglu_limit"), slope=config.number("swiglu_alpha")),
        **stacked("mlp.experts", is_transposed=True, is_interleaved=True, bias_suffix="_bias"),
        has_bias=True,
    )


FAMILY = PLAIN.variant(
    model_type="gpt_oss",
    defaults=usual(
        vocab=201088, width=2880, inner=2880, layers=36, heads=64, kv_heads=8, head_dim=64, context=131072, window=128
    )
    | usual(eps=1e-5, theta=150_000.0, bos=None, eos=None)
    | {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "attention_bias": True,
        "layer_types": None,
        "num_local_experts": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "num_experts_per_tok": 4,
    },
    ignored="experts_per_token initial_context_length",
    aliases={"num_experts": "num_local_experts"},
    attention={"bias": "attention_bias", "sinks": "self_attn.sinks"},
    kinds=2,
    mlp=mlp,
    norm={"is_wide": True},
)
