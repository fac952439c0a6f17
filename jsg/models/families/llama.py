"""Llama 1 to 3.x, and models of its shape such as Vicuna and Yi."""

from functools import partial
from typing import Any

from jsg.fields import Fields
from jsg.models.family import Family
from jsg.models.parts import SLIDING, all_full, read_attention, read_feed_forward, read_layer_types

DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Those of most families, which replace what is different in theirs."""


def kinds(config: Fields) -> list[str]:
    """Windows have no effect."""
    is_on = config.get("sliding_window") is not None and config.get("use_sliding_window") is not False
    if is_on or SLIDING in (read_layer_types(config) or ()):
        config.notes.append("config.json names a sliding window, but Llama has none, so it has no effect")
    return all_full(config)


FAMILY = Family(
    architecture="LlamaForCausalLM",
    model_type="llama",
    defaults=DEFAULTS | {"attention_bias": False, "mlp_bias": False},
    ignored=frozenset({"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}),
    attention=partial(read_attention, bias="attention_bias"),
    kinds=kinds,
    mlp=partial(read_feed_forward, bias="mlp_bias"),
)
