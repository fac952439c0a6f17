"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values, and windows that a switch turns on."""

import dataclasses
from functools import partial

from jsg.models.family import PLAIN, usual
from jsg.models.parts import read_switched_kinds
from jsg.models.rope_fields import MAX_CONTEXT_LEN
from jsg.models.spec import ModelSpec
from jsg.sources import Fields


def slides(config: Fields, layer: int) -> bool:
    """The last layers have windows."""
    return layer >= config.integer("max_window_layers", low=0)


def model(config: Fields, plain: ModelSpec) -> ModelSpec:
    """The model with the context in which dual chunk attention (arXiv:2402.17463) is plain attention."""
    chunks = config.section("dual_chunk_attention_config")
    if chunks is None:
        return plain
    context_len, chunk_len = plain.max_position_embeddings, chunks.integer("chunk_size", high=MAX_CONTEXT_LEN)
    chunk_len -= chunks.integer("local_size", high=chunk_len - 1)
    if chunk_len < context_len:
        config.notes.append(f"the context is {chunk_len} tokens of {context_len}, without dual_chunk_attention_config")
    return dataclasses.replace(plain, max_position_embeddings=min(context_len, chunk_len))


FAMILY = PLAIN.variant(
    model_type="qwen2",
    defaults=usual(vocab=151936, inner=22016, kv_heads=32, context=32768, window=4096)
    | usual(bos=None, eos=None)
    | {
        "use_sliding_window": False,
        "max_window_layers": 28,
        "layer_types": None,
        "dual_chunk_attention_config": None,
    },
    attention={"qkv_bias": True},
    kinds=partial(read_switched_kinds, slides=slides),
    model=model,
)
