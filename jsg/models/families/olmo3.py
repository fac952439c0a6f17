"""OLMo 3 (7B, 32B): OLMo 2 with windows in three of four layers, and a rope for each kind of layer."""

from jsg.models.block_spec import AttentionSpec
from jsg.models.families import olmo2
from jsg.models.parts import FULL, SLIDING, by_kind, read_heads, read_ropes
from jsg.sources import Fields

THETA = 500_000.0


def attention(config: Fields) -> dict[str, AttentionSpec]:
    """The attention of each kind of layer."""
    theta = config.number("rope_theta", low=1.0)
    heads = read_heads(config, bias="attention_bias", qk_norm={"spans_heads": True})
    ropes = read_ropes(config, {FULL: theta, SLIDING: THETA}, heads.head_dim)
    if theta != THETA == ropes[SLIDING].theta:
        config.notes.append(
            f"rope_theta is the base of full layers only, as in transformers; of others it is {THETA:g}"
        )
    return by_kind(heads, ropes)


FAMILY = olmo2.FAMILY.variant(
    model_type="olmo3",
    defaults={"rope_theta": THETA, "sliding_window": 4096, "layer_types": None},
    attention=attention,
    kinds=4,
    scales_context=False,
)
