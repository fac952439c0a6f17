"""Ministral 3 (3B, 8B, 14B), the text model: Mistral whose queries grow with the position."""

from jsg.models.block_spec import AttentionSpec, QueryScaleSpec
from jsg.models.families import mistral
from jsg.models.family import usual
from jsg.models.parts import read_attention
from jsg.models.rope_fields import read_original, rope_section
from jsg.sources import Fields

BETA = "llama_4_scaling_beta"
OWN_ROPE_FIELDS = frozenset({BETA, "max_position_embeddings"})

YARN = {
    "type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}


def attention(config: Fields) -> AttentionSpec:
    """Attention whose queries grow."""
    return read_attention(config, own_rope_fields=OWN_ROPE_FIELDS, query_scale=read_growth(config))


def read_growth(config: Fields) -> QueryScaleSpec:
    """The growth of queries, which is among the fields of rope."""
    rope = rope_section(config)
    return QueryScaleSpec(beta=rope.number(BETA), length=read_original(config, rope))


FAMILY = mistral.FAMILY.variant(
    model_type="ministral3",
    defaults=usual(vocab=131072, layers=34, head_dim=128, context=262144, window=None)
    | {
        "rms_norm_eps": 1e-5,
        "rope_parameters": YARN,
    },
    attention=attention,
)
