"""Command R7B, Command A and their kin: both blocks read the same, and only layers with a window have rope."""

import dataclasses
from functools import partial

from jsg.fields import Fields
from jsg.models.block_spec import AttentionSpec
from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import read_attention, read_kinds, read_norm, rope_where_sliding
from jsg.models.spec import ModelSpec

kinds = partial(read_kinds, full_every="sliding_window_pattern")


def attention(config: Fields) -> list[AttentionSpec]:
    """The attention of each layer. A head is as wide as the number of heads makes it."""
    whole = config.under({"head_dim": None})
    return rope_where_sliding(read_attention(whole, bias="attention_bias", is_interleaved=True), kinds(config))


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """The model whose blocks read the same."""
    layers = tuple(dataclasses.replace(layer, is_parallel=True) for layer in plain.layers)
    return dataclasses.replace(plain, layers=layers, logit_factor=config.number("logit_scale"))


FAMILY = Family(
    architecture="Cohere2ForCausalLM",
    model_type="cohere2",
    defaults={name: value for name, value in llama.DEFAULTS.items() if name != "rms_norm_eps"}
    | {
        "vocab_size": 256000,
        "hidden_size": 8192,
        "intermediate_size": 22528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "attention_bias": False,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "layer_types": None,
        "tie_word_embeddings": True,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    ignored=frozenset(
        "layer_switch order_of_interleaved_layers position_embedding_type rotary_pct use_embedding_sharing "
        "use_gated_activation use_parallel_block use_parallel_embedding".split()
    ),
    attention=attention,
    kinds=kinds,
    norms={"before_attention": "input_layernorm"},
    norm=partial(read_norm, eps_field="layer_norm_eps", is_wide=True, is_centred=True),
    model=model,
)
