"""Ministral 3 (3B, 8B, 14B), the text model: Mistral whose queries grow with the position."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import QueryScaleSpec
from jsg.models.families import mistral
from jsg.models.family import Family
from jsg.models.parts import read_attention, read_feed_forward, read_layer, read_model, with_windows
from jsg.models.rope_fields import MAX_CONTEXT_LEN, rope_section
from jsg.models.spec import ModelSpec

BETA = "llama_4_scaling_beta"


def spec(config: Fields) -> ModelSpec:
    """The growth of queries is among the fields of rope."""
    rope = rope_section(config)
    growth = QueryScaleSpec(
        beta=rope.number(BETA), length=rope.integer("original_max_position_embeddings", high=MAX_CONTEXT_LEN)
    )
    attention = read_attention(config, frozenset({BETA, "max_position_embeddings"}))
    attention = dataclasses.replace(attention, query_scale=growth)
    layer = read_layer(config, attention, read_feed_forward(config))
    return read_model(config, with_windows(layer, mistral.windows(config)))


FAMILY = Family(
    architecture="Ministral3ForCausalLM",
    model_type="ministral3",
    defaults=mistral.DEFAULTS
    | {
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
            BETA: 0.1,
        },
    },
    spec=spec,
    ignored=mistral.FAMILY.ignored,
)
