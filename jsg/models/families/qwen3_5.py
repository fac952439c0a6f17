"""Qwen3.5, 3.6 and 3.8, dense: Qwen3-Next with tensors of their own for queries, keys, values and gates."""

from typing import Any

from jsg.fields import Fields
from jsg.models.delta_spec import DeltaSpec
from jsg.models.families import qwen3_next
from jsg.models.family import Family
from jsg.models.parts import num_layers, read_feed_forward, require_values
from jsg.models.spec import ModelSpec, TensorNames
from jsg.models.wrapper import TEXT_ONLY, TEXT_PREFIXES, Wrapper

ONLY: dict[str, Any] = {"mamba_ssm_dtype": "float32", "attn_output_gate": True}
"""Fields that have no other value in any file."""
GATES = ("swish", "silu")
"""Names of the only function of the gates after linear attention."""


def spec(config: Fields) -> ModelSpec:
    """All layers have the same block."""
    return qwen3_next.read_hybrid(config, read_delta(config), [read_feed_forward(config)] * num_layers(config))


def read_delta(config: Fields) -> DeltaSpec:
    """Queries, keys and values are in one tensor."""
    require_values(config, ONLY)
    gate = config.get("output_gate_type", GATES[0])
    config.require(gate in GATES, "output_gate_type", f"be {' or '.join(GATES)}", gate)
    projections = ("linear_attn.in_proj_qkv",) * 3 + ("linear_attn.in_proj_z",)
    return qwen3_next.read_delta(config, projections, ("linear_attn.in_proj_b", "linear_attn.in_proj_a"))


DEFAULTS = qwen3_next.DEFAULTS | dict.fromkeys(ONLY) | {"output_gate_type": GATES[0], "vocab_size": 248320}

FAMILY = Family(
    architecture="Qwen3_5ForCausalLM",
    model_type="qwen3_5_text",
    defaults=DEFAULTS
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 4, "intermediate_size": 12288},
    spec=spec,
    ignored=qwen3_next.LATER,
)

WRAPPER = Wrapper(
    text_type="qwen3_5_text",
    fields=frozenset(
        "text_config vision_config tie_word_embeddings image_token_id video_token_id vision_start_token_id "
        "vision_end_token_id".split()
    ),
    names=TensorNames(prefixes=TEXT_PREFIXES, unread=r"(model\.visual|mtp)\..*"),
    notes=(TEXT_ONLY,),
)
