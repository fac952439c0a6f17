"""Qwen3.5, 3.6 and 3.8, dense: Qwen3-Next with tensors of their own for queries, keys, values and gates."""

from jsg.models.families import qwen2_moe, qwen3_next
from jsg.models.family import usual
from jsg.models.spec import Mixer
from jsg.models.wrapper import Wrapper
from jsg.sources import Fields

GATES = ("swish", "silu")
"""Names of the only function of the gates after linear attention."""


def attention(config: Fields) -> dict[str, Mixer]:
    """Queries, keys and values are in one tensor."""
    gate = config.get("output_gate_type")
    config.require(gate in GATES, "output_gate_type", f"be {' or '.join(GATES)}", gate)
    return qwen3_next.attention(config, ("in_proj_qkv",) * 3 + ("in_proj_z",), ("in_proj_b", "in_proj_a"))


FAMILY = qwen3_next.FAMILY.variant(
    model_type="qwen3_5_text",
    only={"mamba_ssm_dtype": "float32", "attn_output_gate": True},
    defaults=usual(vocab=248320, width=4096, inner=12288, layers=32, kv_heads=4)
    | {
        "output_gate_type": GATES[0],
    },
    without=" ".join([*qwen2_moe.EXPERTS, "shared_expert_intermediate_size"]),
    attention=attention,
    mlp={},
)

WRAPPER = Wrapper(text_type="qwen3_5_text", unread=r"(model\.visual|mtp)\..*")
