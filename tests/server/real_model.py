"""A small random model on disk with the byte tokenizer of these tests, for servers with the real engine."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.engine.small import MODEL
from tests.server.byte_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_byte_tokenizer

VOCAB = 320
CONTEXT = 32_768
NAN_TOKEN = 300  # its embedding is not a number, so every row that has it in its prompt fails; no answer has it
WIDTH, FFN_WIDTH, NUM_LAYERS, HEAD_DIM = 128, 256, 4, 32
NUM_HEADS, NUM_KV_HEADS = 4, 2


def write_real_model(
    directory: Path, chat_template: str = CHAT_TEMPLATE, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Path:
    """Config, weights from a seed, and tokenizer. A prompt of 1500 tokens takes some ten steps' time on a CPU."""
    directory.mkdir(parents=True)
    config = MODEL | {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": FFN_WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "eos_token_id": 257,
    }
    (directory / "config.json").write_text(json.dumps(config))
    save_file(_weights(), directory / "model.safetensors")
    write_byte_tokenizer(directory, chat_template, special_tokens)
    return directory


def _weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    queries, keys = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    weights = {
        "model.embed_tokens.weight": matrix(VOCAB, WIDTH),
        "model.norm.weight": np.ones(WIDTH, np.float32),
        "lm_head.weight": matrix(VOCAB, WIDTH),
    }
    # The first number of a token's state is the same before every layer and positive after the last norm, so this
    # logit is far below all others, and no draw at any temperature finds the token.
    weights["model.embed_tokens.weight"][:, 0] = 0.01
    weights["model.embed_tokens.weight"][NAN_TOKEN] = np.nan
    weights["lm_head.weight"][:, 0] = 0
    weights["lm_head.weight"][NAN_TOKEN] = np.eye(1, WIDTH) * -1e6
    for layer in range(NUM_LAYERS):
        parts = {
            "input_layernorm": np.ones(WIDTH, np.float32),
            "post_attention_layernorm": np.ones(WIDTH, np.float32),
            "self_attn.q_proj": matrix(queries, WIDTH),
            "self_attn.k_proj": matrix(keys, WIDTH),
            "self_attn.v_proj": matrix(keys, WIDTH),
            "self_attn.o_proj": matrix(WIDTH, queries),
            "mlp.gate_proj": matrix(FFN_WIDTH, WIDTH),
            "mlp.up_proj": matrix(FFN_WIDTH, WIDTH),
            "mlp.down_proj": matrix(WIDTH, FFN_WIDTH),
        }
        for name in ["self_attn.o_proj", "mlp.down_proj"]:
            parts[name][0] = 0
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in parts.items()}
    return weights
