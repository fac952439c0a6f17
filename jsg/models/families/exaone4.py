"""EXAONE 4 (1.2B, 32B): norms of what blocks add and of each head, and rope in layers with a window only."""

from jsg.models.block_spec import AttentionSpec
from jsg.models.family import PLAIN, usual
from jsg.models.parts import FULL, SLIDING, all_full, by_kind, read_attention, read_kinds, read_layer_types
from jsg.sources import Fields


def attention(config: Fields) -> AttentionSpec | dict[str, AttentionSpec]:
    """A model without windows has rope in all layers."""
    plain = read_attention(config, qk_norm={})
    if config.get("sliding_window") is None:
        return plain
    return by_kind(plain, {SLIDING: plain.rope, FULL: None})


def kinds(config: Fields) -> list[str]:
    """The kind of each layer. Files that name kinds may have a pattern of letters, such as LLLG."""
    if config.get("sliding_window") is None:
        return read_layer_types(config) or all_full(config)
    return read_kinds(config, "sliding_window_pattern")


FAMILY = PLAIN.variant(
    model_type="exaone4",
    defaults=usual(vocab=102400, inner=16384, kv_heads=32, window=4096)
    | usual(eps=1e-5, bos=0)
    | {
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    attention=attention,
    kinds=kinds,
    norms={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
)
