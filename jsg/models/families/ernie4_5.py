"""ERNIE 4.5, dense (0.3B): Llama in which neighbours are turned together. `use_bias` means all projections."""

from jsg.models.family import PLAIN

FAMILY = PLAIN.variant(
    architecture="Ernie4_5ForCausalLM",
    model_type="ernie4_5",
    defaults={
        "vocab_size": 103424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "use_bias": False,
        "tie_word_embeddings": True,
    },
    attention={"bias": "use_bias", "is_interleaved": True},
    mlp={"bias": "use_bias"},
)
