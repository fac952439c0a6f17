"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini, dense: Llama with fused projections, and longrope in models of long context."""

from jsg.models.block_spec import AttentionSpec
from jsg.models.families import mistral
from jsg.models.family import PLAIN, usual
from jsg.models.parts import read_attention
from jsg.models.without_effect import ROPE_DICTS
from jsg.sources import Fields

OLD_LONGROPE = ("su", "yarn")
"""What older files call longrope. No Phi-3 has another scaling."""


def attention(config: Fields) -> AttentionSpec:
    """Attention by the current name of longrope."""
    for name in ROPE_DICTS:
        section = config.section(name)
        kind = None if section is None else section.get("rope_type", section.get("type", "default"))
        if section is not None and kind in OLD_LONGROPE:
            config = config.under({name: {**config.get(name), "rope_type": "longrope"}})
        elif section is not None:
            section.require(kind in ("default", "longrope"), "rope_type", "be default or longrope", kind)
    return read_attention(config, is_partial=True, projections=("self_attn.qkv_proj",) * 3)


FAMILY = PLAIN.variant(
    model_type="phi3",
    defaults=usual(vocab=32064, width=3072, inner=8192, context=4096, window=None)
    | usual(eps=1e-5, eos=32000)
    | {
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 1.0,
    },
    ignored="use_sliding_window full_attn_mod interpolate_factor",
    attention=attention,
    kinds=mistral.kinds,
    mlp={"gate": "mlp.gate_up_proj", "up": "mlp.gate_up_proj"},
)
