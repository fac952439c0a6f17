"""Mistral Small 3.1 and 3.2, and Ministral 3 as it is published: a text model beside a tower, which is not built."""

from jsg.models.wrapper import Wrapper

WRAPPER = Wrapper(
    text_type="mistral",
    text_half={
        "vocab_size": 131072,
        "hidden_size": 5120,
        "intermediate_size": 32768,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000_000.0,
        "sliding_window": None,
    },
    is_tied=True,
    fields="spatial_merge_size",
)
