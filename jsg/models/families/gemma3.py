"""Gemma 3, the text model: Gemma 2 with norms of queries and keys, and with a rope for each kind of layer."""

import dataclasses

from jsg.fields import Fields
from jsg.models.block_spec import QueryKeyNormSpec
from jsg.models.families import gemma2
from jsg.models.family import Family
from jsg.models.parts import FULL, MAX_LAYERS, SLIDING, of_kinds, read_eps, read_layer_kinds, read_ropes
from jsg.models.spec import ModelSpec
from jsg.models.wrapper import TEXT_NAMES, TEXT_ONLY, Wrapper


def spec(config: Fields) -> ModelSpec:
    """The model of a file, whose context is the one with scaled rope."""
    norm = QueryKeyNormSpec(eps=read_eps(config), is_wide=True, adds_one=True)
    attention = dataclasses.replace(gemma2.heads(config), qk_norm=norm)
    thetas = {FULL: config.number("rope_theta", low=1.0), SLIDING: config.number("rope_local_base_freq", low=1.0)}
    kinds = read_layer_kinds(config, config.integer("sliding_window_pattern", high=MAX_LAYERS))
    layers = of_kinds(config, kinds, attention, read_ropes(config, thetas, attention.head_dim))
    return gemma2.read_gemma(config, layers, scales_context=False)


FAMILY = Family(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    defaults=gemma2.DEFAULTS
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "sliding_window_pattern": 6,
    },
    spec=spec,
    ignored=frozenset({"hidden_act"}),
)

WRAPPER = Wrapper(
    text_type="gemma3_text",
    is_tied=True,
    fields=frozenset(
        "text_config vision_config tie_word_embeddings mm_tokens_per_image boi_token_index eoi_token_index "
        "image_token_index".split()
    ),
    names=TEXT_NAMES,
    notes=(TEXT_ONLY,),
)
