"""A Llama or Mixtral in plain numpy whose rows are rounded to e4m3 before they meet restored kernels.

It shares no code with jsg, and knows kernels by what they mean: numbers in float64, and in how many groups of inputs
they were scaled.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.golden.variants import VARIANTS, random_tensor, tensor_shapes
from tests.models.packers import FORMS, Form, fp8, write_packed

BLOCK = 128
_WIDE = {"hidden_size": BLOCK, "intermediate_size": 2 * BLOCK, "head_dim": 64, "num_key_value_heads": 2}
CONFIGS = {"dense": VARIANTS["llama_mha"] | _WIDE, "experts": VARIANTS["mixtral"] | _WIDE | {"num_hidden_layers": 1}}
"""Two devices can share out the inputs of every kernel in blocks."""
KINDS = {
    "channel": FORMS["channel"],
    "blocks": Form({"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, fp8((BLOCK, BLOCK), "_scale_inv")),
}
SPLIT = ("o_proj", "down_proj", "w2")
"""Projections whose inputs devices share out."""


@dataclasses.dataclass(frozen=True)
class Fp8Model:
    """A written checkpoint, and its logits by the definition."""

    directory: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]
    packed: frozenset[str]
    block: int | None

    def logits(self, tokens: Sequence[int], devices: int = 1, *, round_rows: bool = True) -> np.ndarray:
        """The logits [tokens, vocabulary] of a prompt, with products whose inputs so many devices share out."""
        project = self._projection(devices if round_rows else 0)
        x = self._wide("model.embed_tokens.weight")[list(tokens)]
        for index in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{index}"
            x = x + self._attend(self._normed(x, f"{name}.input_layernorm"), f"{name}.self_attn", project)
            normed = self._normed(x, f"{name}.post_attention_layernorm")
            if "num_local_experts" in self.config:
                x = x + self._chosen(normed, f"{name}.block_sparse_moe", project)
            else:
                x = x + _gated(normed, [f"{name}.mlp.{each}_proj" for each in ("gate", "up", "down")], project)
        return self._normed(x, "model.norm") @ self._wide("lm_head.weight").T

    def _wide(self, name: str) -> np.ndarray:
        return np.asarray(self.tensors[name], np.float64)

    def _projection(self, devices: int) -> "Project":
        def project(x: np.ndarray, name: str) -> np.ndarray:
            kernel = self._wide(f"{name}.weight")
            if devices and f"{name}.weight" in self.packed:
                x = rounded(x, x.shape[1] // self.block if self.block else devices if name.endswith(SPLIT) else 1)
            return x @ kernel.T

        return project

    def _normed(self, x: np.ndarray, name: str) -> np.ndarray:
        square = (x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]
        return x / np.sqrt(square) * self._wide(f"{name}.weight")

    def _attend(self, x: np.ndarray, name: str, project: "Project") -> np.ndarray:
        width, count = self.config["head_dim"], len(x)
        angle = np.arange(count)[:, None] * self.config["rope_theta"] ** (-np.arange(0, width, 2) / width)

        def turned(heads: np.ndarray) -> np.ndarray:
            low, high = np.split(heads, 2, -1)
            cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
            return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

        q, k, v = (project(x, f"{name}.{each}_proj").reshape(count, -1, width) for each in "qkv")
        k, v = (np.repeat(each, q.shape[1] // k.shape[1], 1) for each in (turned(k), v))
        scores = np.einsum("qhd,khd->hqk", turned(q), k) / np.sqrt(width)
        scores = np.where(np.tri(count, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        return project(mixed.reshape(count, -1), f"{name}.o_proj")

    def _chosen(self, x: np.ndarray, name: str, project: "Project") -> np.ndarray:
        judged = np.exp(project(x, f"{name}.gate"))
        best = np.argsort(-judged)[:, : self.config["num_experts_per_tok"]]
        made = np.zeros_like(x)
        for token, experts in enumerate(best):
            for expert in experts:
                names = [f"{name}.experts.{expert}.{each}" for each in ("w1", "w3", "w2")]
                share = judged[token, expert] / judged[token, experts].sum()
                made[token] += share * _gated(x[token : token + 1], names, project)[0]
        return made


Project = Callable[[np.ndarray, str], np.ndarray]


def rounded(x: np.ndarray, groups: int) -> np.ndarray:
    """What rows mean after each of so many groups of their numbers was rounded to e4m3, with 448 for the largest."""
    parts = x.reshape(len(x), groups, -1)
    scale = np.abs(parts).max(-1, keepdims=True) / 448
    return ((parts / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).reshape(x.shape)


def _gated(x: np.ndarray, names: Sequence[str], project: Project) -> np.ndarray:
    gate, up = (project(x, name) for name in names[:2])
    return project(gate / (1 + np.exp(-gate)) * up, names[2])


def write_model(directory: Path, shape: str, kind: str) -> Fp8Model:
    """Writes a checkpoint of a shape of `CONFIGS` whose projections are of a kind of `KINDS`."""
    config = CONFIGS[shape]
    tensors = {name: random_tensor(name, name, size) for name, size in tensor_shapes(config).items()}
    meant = write_packed(directory, config, KINDS[kind], tensors)
    packed = frozenset(name for name in tensors if meant[name] is not tensors[name])
    return Fp8Model(directory, config, meant, packed, BLOCK if kind == "blocks" else None)
