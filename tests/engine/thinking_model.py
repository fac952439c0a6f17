"""A small model that thinks: a real checkpoint whose weights say which token follows each token.

Attention and MLP add nothing, so the logits are those of the last token alone. The model writes THOUGHT after a line
break, then the end marker. What it says where no rule speaks is drawn with the weights, and the same each time.
"""

import json
import pathlib
from typing import Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.engine import small

THOUGHT = "abcdefghijklmnopqrstuvwxyzé€0123456789"
BEGIN, END = "<think>", "</think>"
Kind = Literal["special", "added", "text"]
"""What the markers are: special tokens, added tokens that are not special, or no tokens of their own."""

_BYTES = sorted({*range(32, 127), *b"\n", *"é€".encode()} - set(b"@$%&*+;=?ABCDEFGHIJKLMNOPQRSTUVWXYZ^`~#!'()|"))


def write_model(directory: pathlib.Path, kind: Kind, template: str | None = None) -> pathlib.Path:
    """Writes config, weights and tokenizer."""
    small.write_model(directory)
    tokenizer = _write_tokenizer(directory, kind, template)
    rng = np.random.default_rng(7)
    hidden, vocab = small.MODEL["hidden_size"], small.VOCAB
    embedding = rng.normal(size=(vocab, hidden)).astype(np.float32)
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True) / np.sqrt(hidden)
    head = 0.3 * rng.normal(size=(vocab, hidden)).astype(np.float32)
    ids = [token for char in THOUGHT for token in tokenizer.encode(char).ids]
    newline, end = tokenizer.encode("\n").ids[0], tokenizer.encode(END).ids
    script = [newline, *ids, end[0]]
    assert len(set(script)) == len(script)
    for token, following in zip(script, [*script[1:], newline], strict=True):
        head[following] += embedding[token]
    save_file(
        {name: _weight(name, shape, embedding, head) for name, shape in _shapes().items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def _write_tokenizer(directory: pathlib.Path, kind: Kind, template: str | None) -> Tokenizer:
    letters = [_letter(byte) for byte in _BYTES]
    tokens = ["<pad>", "<eos>", *letters]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<eos>"])
    if kind != "text":
        tokenizer.add_tokens([AddedToken(text, special=kind == "special", normalized=False) for text in (BEGIN, END)])
    assert tokenizer.get_vocab_size() < small.VOCAB
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": "<eos>"} | ({} if template is None else {"chat_template": template})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return tokenizer


def _letter(byte: int) -> str:
    """A byte in the alphabet of byte-level tokenizers, where those that are no visible characters come behind 255."""
    if 33 <= byte <= 126 or byte >= 161:
        return chr(byte)
    return chr(256 + byte) if byte <= 32 else chr(256 + 33 + byte - 127)


def _shapes() -> dict[str, tuple[int, ...]]:
    m = small.MODEL
    hidden, mlp = m["hidden_size"], m["intermediate_size"]
    heads, kv = m["num_attention_heads"] * m["head_dim"], m["num_key_value_heads"] * m["head_dim"]
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes = {
        f"model.layers.{i}.{name}.weight": shape for i in range(m["num_hidden_layers"]) for name, shape in layer.items()
    }
    return shapes | {
        "model.embed_tokens.weight": (small.VOCAB, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (small.VOCAB, hidden),
    }


def _weight(name: str, shape: tuple[int, ...], embedding: np.ndarray, head: np.ndarray) -> np.ndarray:
    if name == "model.embed_tokens.weight":
        return embedding
    if name == "lm_head.weight":
        return head
    return np.ones(shape, np.float32) if len(shape) == 1 else np.zeros(shape, np.float32)
