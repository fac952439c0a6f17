"""Gemma 3, the text model: Gemma 2 with norms of queries and keys, and with a rope for each kind of layer."""

from jsg.models.block_spec import AttentionSpec
from jsg.models.families import gemma2
from jsg.models.family import usual
from jsg.models.parts import FULL, SLIDING, by_kind, read_ropes
from jsg.models.wrapper import Wrapper
from jsg.sources import Fields


def attention(config: Fields) -> dict[str, AttentionSpec]:
    """The attention of each kind of layer."""
    heads = gemma2.heads(config, qk_norm={"is_wide": True, "adds_one": True})
    thetas = {FULL: config.number("rope_theta", low=1.0), SLIDING: config.number("rope_local_base_freq", low=1.0)}
    return by_kind(heads, read_ropes(config, thetas, heads.head_dim))


FAMILY = gemma2.FAMILY.variant(
    model_type="gemma3_text",
    defaults=usual(vocab=262208, context=131072)
    | {
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
    without="attn_logit_softcapping",
    ignored="hidden_act",
    attention=attention,
    kinds="sliding_window_pattern",
    scales_context=False,
)

WRAPPER = Wrapper(text_type="gemma3_text", is_tied=True, fields="mm_tokens_per_image boi_token_index eoi_token_index")
