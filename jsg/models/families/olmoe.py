"""OLMoE (1B-7B): Llama with norms of all heads together, and experts in all layers."""

from jsg.models.block_spec import ExpertsSpec
from jsg.models.family import PLAIN, usual
from jsg.models.parts import is_on, read_experts
from jsg.sources import Fields


def mlp(config: Fields) -> ExpertsSpec:
    """Experts whose weights need not sum to one."""
    choice = {"is_renormed": is_on(config, "norm_topk_prob")}
    return read_experts(config, "num_experts", "intermediate_size", choice=choice)


FAMILY = PLAIN.variant(
    model_type="olmoe",
    only={"clip_qkv": None},
    defaults=usual(vocab=50304, width=2048, inner=2048, layers=16, heads=16, context=4096, per_token=8)
    | usual(eps=1e-5, bos=None, eos=50279)
    | {
        "num_experts": 64,
        "norm_topk_prob": False,
    },
    aliases={"num_local_experts": "num_experts"},
    attention={"bias": "attention_bias", "qk_norm": {"spans_heads": True}},
    mlp=mlp,
)
