"""A Llama in float64 numpy for whole sequences. A mask says which tokens see which; a list has their positions."""

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

from jsg.types import Request


def write_weights(directory: pathlib.Path, seed: int = 0) -> None:
    """Random weights for the `config.json` in a directory, in the names of its family's checkpoints."""
    config = json.loads((directory / "config.json").read_text())
    rng = np.random.default_rng(seed)
    width, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    shapes = {
        "model.embed_tokens.weight": (vocab, width),
        "lm_head.weight": (vocab, width),
        "model.norm.weight": (width,),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (width,),
            f"{prefix}.post_attention_layernorm.weight": (width,),
            f"{prefix}.self_attn.q_proj.weight": (heads * head_dim, width),
            f"{prefix}.self_attn.k_proj.weight": (kv_heads * head_dim, width),
            f"{prefix}.self_attn.v_proj.weight": (kv_heads * head_dim, width),
            f"{prefix}.self_attn.o_proj.weight": (width, heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": (inner, width),
            f"{prefix}.mlp.up_proj.weight": (inner, width),
            f"{prefix}.mlp.down_proj.weight": (width, inner),
        }
    tensors = {
        name: (
            1 + 0.1 * rng.standard_normal(shape) if len(shape) == 1 else rng.standard_normal(shape) * shape[1] ** -0.5
        )
        for name, shape in shapes.items()
    }
    tensors["lm_head.weight"] *= 3  # so that the choices are not all alike
    save_file({name: tensor.astype(np.float32) for name, tensor in tensors.items()}, directory / "model.safetensors")


class DenseModel:
    """The model of a directory."""

    def __init__(self, directory: pathlib.Path):
        self._config = json.loads((directory / "config.json").read_text())
        self._weights = {name: w.astype(np.float64) for name, w in load_file(directory / "model.safetensors").items()}

    def logprobs(self, tokens: list[int], positions: list[int], sees: np.ndarray) -> np.ndarray:
        """float64 [T, V]: what each token says of the next; `sees` is bool [T, T], from query to key."""
        weights, config = self._weights, self._config
        x = weights["model.embed_tokens.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}"
            normed = self._norm(x, f"{prefix}.input_layernorm.weight")
            q, k, v = (self._heads(normed, f"{prefix}.self_attn.{name}_proj.weight") for name in "qkv")
            q, k = self._turned(q, positions), self._turned(k, positions)
            group = q.shape[1] // k.shape[1]
            k, v = k.repeat(group, axis=1), v.repeat(group, axis=1)
            scores = np.einsum("qhd,khd->hqk", q, k) * config["head_dim"] ** -0.5
            scores = np.where(sees, scores, -np.inf)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            gathered = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
            x = x + gathered.reshape(len(tokens), -1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T
            normed = self._norm(x, f"{prefix}.post_attention_layernorm.weight")
            gate, up = (normed @ weights[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
        logits = self._norm(x, "model.norm.weight") @ weights["lm_head.weight"].T
        logits -= logits.max(axis=-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self._config["rms_norm_eps"]) * self._weights[name]

    def _heads(self, x: np.ndarray, name: str) -> np.ndarray:
        return (x @ self._weights[name].T).reshape(len(x), -1, self._config["head_dim"])

    def _turned(self, x: np.ndarray, positions: list[int]) -> np.ndarray:
        half = x.shape[-1] // 2
        angles = np.array(positions)[:, None, None] * self._config["rope_theta"] ** (-np.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def mask(request: Request, size: int) -> np.ndarray:
    """bool [size, size]: what each token of a request, and of what follows its prompt, sees."""
    sees = np.tril(np.ones((size, size), bool))
    if request.joined:
        first, last = request.joined[0], request.joined[-1]
        branch = np.zeros(size, int)
        for number, start in enumerate(request.joined[:-1]):
            branch[start:last] = number
        inside = (np.arange(size) >= first) & (np.arange(size) < last)
        others = inside[:, None] & inside[None, :] & (branch[:, None] != branch[None, :])
        sees &= ~others
    return sees
