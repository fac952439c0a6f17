"""Command R7B, Command A and their kin: both blocks read the same, and only layers with a window have rope."""

import dataclasses

from jsg.models.block_spec import AttentionSpec
from jsg.models.family import PLAIN, usual
from jsg.models.parts import FULL, SLIDING, by_kind, read_attention
from jsg.models.spec import ModelSpec
from jsg.sources import Fields


def attention(config: Fields) -> dict[str, AttentionSpec]:
    """The attention of each kind of layer."""
    plain = read_attention(config, bias="attention_bias", is_interleaved=True)
    return by_kind(plain, {SLIDING: plain.rope, FULL: None})


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """The model whose blocks read the same."""
    layers = tuple(dataclasses.replace(layer, is_parallel=True) for layer in plain.layers)
    return dataclasses.replace(plain, layers=layers, logit_factor=config.number("logit_scale"))


FAMILY = PLAIN.variant(
    model_type="cohere2",
    defaults=usual(vocab=256000, width=8192, inner=22528, layers=40, heads=64, context=8192, window=4096)
    | usual(tied=True, bos=5, eos=255001)
    | {
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window_pattern": 4,
        "layer_types": None,
    },
    without="rms_norm_eps",
    ignored="layer_switch order_of_interleaved_layers position_embedding_type rotary_pct use_embedding_sharing "
    "use_gated_activation use_parallel_block use_parallel_embedding",
    attention=attention,
    kinds="sliding_window_pattern",
    norms={"before_attention": "input_layernorm"},
    norm={"eps_field": "layer_norm_eps", "is_wide": True, "is_centred": True},
    model=model,
)
