"""The tiny Llama in training form: one dense forward pass, its initialisation, and its Hugging Face files.

B rows, T tokens, D model, N query heads, K KV heads, G query heads per KV head, H head dim, F ffn, V vocab.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

Params = dict[str, jax.Array]


@dataclass(frozen=True)
class TinyConfig:
    """Shape of the model."""

    vocab_size: int = 1408
    num_layers: int = 4
    dim: int = 192
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    ffn_dim: int = 448
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    max_positions: int = 4096

    def to_hf(self) -> dict:
        """Return config.json as transformers writes it."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "initializer_range": 0.02,
            "intermediate_size": self.ffn_dim,
            "max_position_embeddings": self.max_positions,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "pretraining_tp": 1,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }


def init_params(config: TinyConfig, seed: int = 0) -> Params:
    """Return random parameters under their Hugging Face names, matrices as [out, in]."""
    rng = np.random.default_rng(seed)
    dim, q_dim, kv_dim = config.dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(out_dim: int, in_dim: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(size=(out_dim, in_dim)) * scale / in_dim**0.5, jnp.float32)

    residual = (2 * config.num_layers) ** -0.5
    params = {
        "model.embed_tokens.weight": jnp.asarray(rng.normal(size=(config.vocab_size, dim)) * 0.04, jnp.float32),
        "model.norm.weight": jnp.ones(dim),
    }
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        params |= {
            prefix + "input_layernorm.weight": jnp.ones(dim),
            prefix + "post_attention_layernorm.weight": jnp.ones(dim),
            prefix + "self_attn.q_proj.weight": matrix(q_dim, dim),
            prefix + "self_attn.k_proj.weight": matrix(kv_dim, dim),
            prefix + "self_attn.v_proj.weight": matrix(kv_dim, dim),
            prefix + "self_attn.o_proj.weight": matrix(dim, q_dim, residual),
            prefix + "mlp.gate_proj.weight": matrix(config.ffn_dim, dim),
            prefix + "mlp.up_proj.weight": matrix(config.ffn_dim, dim),
            prefix + "mlp.down_proj.weight": matrix(dim, config.ffn_dim, residual),
        }
    return params


def _rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply half-split RoPE to [B, T, heads, H]."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attention(params: Params, prefix: str, config: TinyConfig, x: jax.Array, cos, sin, visible: jax.Array):
    """Grouped-query attention to what is visible; also returns the rotated keys and values [B, T, K, H]."""
    rows, length, _ = x.shape
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    q = (x @ params[prefix + "q_proj.weight"].T).reshape(rows, length, heads, head_dim)
    k = (x @ params[prefix + "k_proj.weight"].T).reshape(rows, length, kv_heads, head_dim)
    v = (x @ params[prefix + "v_proj.weight"].T).reshape(rows, length, kv_heads, head_dim)
    q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k) * head_dim**-0.5
    scores = jnp.where(visible[:, None, None], scores, -1e30)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", jax.nn.softmax(scores, axis=-1), v)
    return out.reshape(rows, length, heads * head_dim) @ params[prefix + "o_proj.weight"].T, (k, v)


def forward(params: Params, config: TinyConfig, tokens: jax.Array, visible: jax.Array | None = None) -> jax.Array:
    """Return the hidden states [B, T, D] after the final norm for token ids [B, T].

    `visible` [B, T, T] says which tokens each one sees, itself included, where that is not all up to it; how many it
    sees is its position.
    """
    if visible is None:
        visible = jnp.tril(jnp.ones((1, tokens.shape[1], tokens.shape[1]), bool))
    inverse = config.rope_theta ** (-jnp.arange(0, config.head_dim, 2) / config.head_dim)
    angles = ((visible.sum(-1) - 1)[..., None] * inverse)[:, :, None, :]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    x = params["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        normed = _rms_norm(x, params[prefix + "input_layernorm.weight"], config.norm_eps)
        attended, _ = _attention(params, prefix + "self_attn.", config, normed, cos, sin, visible)
        x = x + attended
        normed = _rms_norm(x, params[prefix + "post_attention_layernorm.weight"], config.norm_eps)
        gate = jax.nn.silu(normed @ params[prefix + "mlp.gate_proj.weight"].T)
        x = x + (gate * (normed @ params[prefix + "mlp.up_proj.weight"].T)) @ params[prefix + "mlp.down_proj.weight"].T
    return _rms_norm(x, params["model.norm.weight"], config.norm_eps)


def logits(params: Params, hidden: jax.Array) -> jax.Array:
    """Return the logits [..., V] of hidden states [..., D], with the tied embedding."""
    return hidden @ params["model.embed_tokens.weight"].T


def save_model(params: Params, config: TinyConfig, folder: Path) -> None:
    """Write config.json, generation_config.json and the parameters rounded to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")
    generation = {"bos_token_id": 1, "eos_token_id": [2], "pad_token_id": 0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    tensors = {name: np.asarray(value).astype(ml_dtypes.bfloat16) for name, value in params.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)


def load_model(folder: Path) -> tuple[Params, TinyConfig]:
    """Read a folder written by `save_model`; parameters come back in float32."""
    hf = json.loads((folder / "config.json").read_text())
    config = TinyConfig(
        vocab_size=hf["vocab_size"],
        num_layers=hf["num_hidden_layers"],
        dim=hf["hidden_size"],
        num_heads=hf["num_attention_heads"],
        num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        ffn_dim=hf["intermediate_size"],
        rope_theta=hf["rope_theta"],
        norm_eps=hf["rms_norm_eps"],
        max_positions=hf["max_position_embeddings"],
    )
    tensors = load_file(folder / "model.safetensors")
    return {name: jnp.asarray(value.astype(np.float32)) for name, value in tensors.items()}, config
