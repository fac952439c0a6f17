"""The models on which drafts are measured: one that copies from its prompt, and small ones with larger steps."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (makes bfloat16 known to NumPy)
import numpy as np
from safetensors.numpy import load_file, save_file

from bench.report import ROOT
from bench.shapes import LLAMA_100M

TRAINING = ROOT / "examples" / "tiny_model" / "train_copying.py"


def copying_model(folder: Path) -> Path:
    """The directory of the model that copies. Where there is none it is trained, which takes minutes."""
    path, partial = folder / "copying", folder / "copying.partial"
    if not path.exists():
        print(f"training {path}", flush=True)
        subprocess.run([sys.executable, str(TRAINING), "--out", str(partial)], check=True, cwd=ROOT)
        partial.replace(path)
    return path


def wide_model(source: Path, path: Path) -> Path:
    """Makes a model with the layers of `LLAMA_100M` whose answers are those of a small one, unless it is there.

    What is more than in that model adds nothing: it is computed, and is zero.
    """
    partial = path.with_suffix(".partial")
    if not path.exists():
        shutil.copytree(source, partial, dirs_exist_ok=True)
        small = json.loads((source / "config.json").read_text(encoding="utf-8"))
        shape = wide_shape(small)
        (partial / "config.json").write_text(json.dumps(shape), encoding="utf-8")
        weights = {name: each.astype(np.float32) for name, each in load_file(source / "model.safetensors").items()}
        save_file(widened(weights, small, shape), partial / "model.safetensors", metadata={"format": "pt"})
        partial.replace(path)
    return path


def wide_shape(small: dict[str, Any]) -> dict[str, Any]:
    """The config of the wide model. The mean of squares is over more numbers, so what is added to it is less."""
    sizes = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    wider = {name: LLAMA_100M[name] for name in sizes.split()}
    epsilon = small["rms_norm_eps"] * small["hidden_size"] / wider["hidden_size"]
    rotation = {"rope_parameters": {"rope_type": "default", "rope_theta": small["rope_theta"]}}
    own = {"rms_norm_eps": epsilon, "dtype": "float32", "torch_dtype": "float32", "tie_word_embeddings": False}
    return small | wider | rotation | own  # not tied, as the writer of GGUF for peers has it


def widened(weights: dict[str, np.ndarray], small: dict[str, Any], wide: dict[str, Any]) -> dict[str, np.ndarray]:
    """The weights of the wide model.

    A head of twice the width has each frequency of the small one, and as many others between them, which stay zero.
    """
    head, wide_head = small["head_dim"], wide["head_dim"]
    assert wide_head == 2 * head, "every second frequency is one of the small model"
    in_head = 2 * np.arange(head)  # pairs are halves of a head, of which each is twice as wide
    width, wide_width = small["hidden_size"], wide["hidden_size"]

    def rows_of(num_heads: int) -> np.ndarray:
        return (np.arange(num_heads)[:, None] * wide_head + in_head).ravel()

    rows = {
        "q_proj": (rows_of(small["num_attention_heads"]), wide["num_attention_heads"] * wide_head),
        "k_proj": (rows_of(small["num_key_value_heads"]), wide["num_key_value_heads"] * wide_head),
        "v_proj": (rows_of(small["num_key_value_heads"]), wide["num_key_value_heads"] * wide_head),
        "gate_proj": (np.arange(small["intermediate_size"]), wide["intermediate_size"]),
        "up_proj": (np.arange(small["intermediate_size"]), wide["intermediate_size"]),
    }
    back = {"o_proj": rows["q_proj"], "down_proj": rows["gate_proj"]}
    found = {
        "model.embed_tokens.weight": np.zeros((small["vocab_size"], wide_width), np.float32),
        "model.norm.weight": np.zeros(wide_width, np.float32),
    }
    found["model.embed_tokens.weight"][:, :width] = weights["model.embed_tokens.weight"]
    found["lm_head.weight"] = found["model.embed_tokens.weight"].copy()
    found["model.norm.weight"][:width] = weights["model.norm.weight"] * math.sqrt(width / wide_width)
    for layer in range(wide["num_hidden_layers"]):
        prefix, is_used = f"model.layers.{layer}.", layer < small["num_hidden_layers"]
        for part in (*rows, *back):
            where = "mlp" if part in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            places, size = rows[part] if part in rows else back[part]
            matrix = np.zeros((size, wide_width), np.float32)
            if is_used:
                own = weights[f"{prefix}{where}.{part}.weight"]
                scale = math.sqrt(wide_head / head) if part == "q_proj" else 1.0
                matrix[places, :width] = (own.T if part in back else own) * scale
            found[f"{prefix}{where}.{part}.weight"] = np.ascontiguousarray(matrix.T) if part in back else matrix
        for part in ("input_layernorm", "post_attention_layernorm"):
            norm = found[f"{prefix}{part}.weight"] = np.zeros(wide_width, np.float32)
            if is_used:
                norm[:width] = weights[f"{prefix}{part}.weight"] * math.sqrt(width / wide_width)
    return found
