"""OLMo 2: Llama with norms of what blocks add, not of what they read, and of all heads together."""

from functools import partial

from jsg.models.families import llama
from jsg.models.family import Family
from jsg.models.parts import read_attention, read_norm

FAMILY = Family(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    defaults=llama.DEFAULTS
    | {
        "vocab_size": 50304,
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": 50279,
    },
    attention=partial(read_attention, bias="attention_bias", qk_norm={"spans_heads": True}),
    norms={"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    norm=partial(read_norm, is_wide=True),
)
