"""Writes GGUF files: the container, tensors of each type, a model that was saved for transformers, a tokenizer.

It shares nothing with `jsg/gguf` and was written from the layout of llama.cpp's blocks: here each number of a block is
put where its index says, there blocks are taken apart as a whole.
"""

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CODES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
Tensors = Mapping[str, np.ndarray]
Written = tuple[bytes, np.ndarray]
"""The bytes of a tensor, and the numbers that they mean."""


def container(
    entries: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    *,
    version: int = 3,
    order: str = "<",
    alignment: int | None = None,
) -> bytes:
    """A whole file. A tensor has a type, a shape and bytes."""
    entries = dict(entries) | ({} if alignment is None else {"general.alignment": alignment})
    head = b"GGUF" + struct.pack(order + "IQQ", version, len(tensors), len(entries))
    for key, value in entries.items():
        head += _string(key, order) + _value(value, order)
    step, offset, body = alignment or 32, 0, b""
    for name, (kind, shape, data) in tensors.items():
        head += _string(name, order) + struct.pack(order + "I", len(shape))
        head += struct.pack(order + f"{len(shape)}Q", *reversed(shape)) + struct.pack(order + "IQ", CODES[kind], offset)
        padded = data + bytes(-len(data) % step)
        body, offset = body + padded, offset + len(padded)
    return head + bytes(-len(head) % step) + body


def _string(text: str, order: str) -> bytes:
    encoded = text.encode()
    return struct.pack(order + "Q", len(encoded)) + encoded


def _value(value: Any, order: str, with_type: bool = True) -> bytes:
    kind, packed = _scalar(value, order)
    return (struct.pack(order + "I", kind) if with_type else b"") + packed


def _scalar(value: Any, order: str) -> tuple[int, bytes]:
    match value:
        case bool():
            return 7, struct.pack("?", value)
        case int():
            return 4, struct.pack(order + "I", value)
        case float():
            return 6, struct.pack(order + "f", value)
        case str():
            return 8, _string(value, order)
    items = list(value)
    kind = (
        8 if isinstance(items[0], str) else 7 if isinstance(items[0], bool) else 5 if isinstance(items[0], int) else 6
    )
    one = {8: lambda x: _string(x, order), 7: lambda x: struct.pack("?", x)}.get(
        kind, lambda x: struct.pack(order + ("i" if kind == 5 else "f"), x)
    )
    return 9, struct.pack(order + "IQ", kind, len(items)) + b"".join(map(one, items))


def rounded(numbers: np.ndarray, kind: str) -> Written:
    """The bytes of numbers in a type, and the numbers that are left."""
    if kind in ("F32", "F16", "BF16"):
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}[kind]
        return numbers.astype(dtype).tobytes(), numbers.astype(dtype).astype(np.float32)
    per_block, write = _WRITERS[kind]
    data, restored = write(numbers.astype(np.float32).reshape(-1, per_block))
    return data.tobytes(), restored.reshape(numbers.shape)


def _half(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16)


def _put_half(out: np.ndarray, at: int, half: np.ndarray) -> None:
    out[:, at : at + 2] = half.astype("<f2").reshape(-1, 1).view(np.uint8)


def _write_q8_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = _half(np.abs(blocks).max(axis=1) / 127)
    whole = np.clip(np.rint(blocks / np.maximum(scale.astype(np.float32), 1e-9)[:, None]), -128, 127).astype(np.int32)
    out, restored = np.zeros((len(blocks), 34), np.uint8), np.zeros_like(blocks)
    _put_half(out, 0, scale)
    for j in range(32):
        out[:, 2 + j] = whole[:, j] & 255
        restored[:, j] = whole[:, j].astype(np.float32) * scale.astype(np.float32)
    return out, restored


def _write_q4_0(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = _half(np.abs(blocks).max(axis=1) / -8)
    whole = np.clip(np.rint(blocks / np.minimum(scale.astype(np.float32), -1e-9)[:, None]) + 8, 0, 15).astype(np.int32)
    out, restored = np.zeros((len(blocks), 18), np.uint8), np.zeros_like(blocks)
    _put_half(out, 0, scale)
    for j in range(32):
        out[:, 2 + j % 16] |= (whole[:, j] << (4 if j >= 16 else 0)).astype(np.uint8)
        restored[:, j] = (whole[:, j] - 8).astype(np.float32) * scale.astype(np.float32)
    return out, restored


def _scales_and_minima(blocks: np.ndarray, most: int, out: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What numbers of 0 to `most` are multiplied by, and what is subtracted, for each of eight groups of 32."""
    groups = blocks.reshape(-1, 8, 32)
    low = np.maximum(0, -groups.min(axis=2))
    step = (groups.max(axis=2) + low) / most
    d, dmin = _half(step.max(axis=1) / 63), _half(low.max(axis=1) / 63)
    d_32, dmin_32 = (np.maximum(x.astype(np.float32), 1e-9)[:, None] for x in (d, dmin))
    scale = np.clip(np.rint(step / d_32), 1, 63).astype(np.int32)
    minimum = np.clip(np.rint(low / dmin_32), 0, 63).astype(np.int32)
    _put_half(out, 0, d)
    _put_half(out, 2, dmin)
    for j in range(4):
        out[:, 4 + j] = scale[:, j] | (scale[:, j + 4] >> 4 << 6)
        out[:, 8 + j] = minimum[:, j] | (minimum[:, j + 4] >> 4 << 6)
        out[:, 12 + j] = (scale[:, j + 4] & 15) | ((minimum[:, j + 4] & 15) << 4)
    return d.astype(np.float32)[:, None] * scale, dmin.astype(np.float32)[:, None] * minimum


def _write_k(blocks: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Q4_K and Q5_K. The fifth bits have 32 bytes of their own, a bit for each of eight groups."""
    out = np.zeros((len(blocks), 144 if bits == 4 else 176), np.uint8)
    scale, minimum = _scales_and_minima(blocks, 2**bits - 1, out)
    restored, nibbles = np.zeros_like(blocks), 16 if bits == 4 else 48
    for j in range(256):
        group = j // 32
        whole = np.rint((blocks[:, j] + minimum[:, group]) / np.maximum(scale[:, group], 1e-9))
        whole = np.clip(whole, 0, 2**bits - 1).astype(np.int32)
        out[:, nibbles + j // 64 * 32 + j % 32] |= ((whole & 15) << (4 * (group % 2))).astype(np.uint8)
        if bits == 5:
            out[:, 16 + j % 32] |= ((whole >> 4) << group).astype(np.uint8)
        restored[:, j] = scale[:, group] * whole.astype(np.float32) - minimum[:, group]
    return out, restored


def _write_q6_k(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    out, restored = np.zeros((len(blocks), 210), np.uint8), np.zeros_like(blocks)
    groups = np.abs(blocks).reshape(-1, 16, 16).max(axis=2) / 32
    d = _half(groups.max(axis=1) / -127)
    d_32 = np.minimum(d.astype(np.float32), -1e-9)[:, None]
    scales = np.clip(np.rint(groups / d_32), -128, -1).astype(np.int32)
    _put_half(out, 208, d)
    out[:, 192:208] = scales & 255
    for j in range(256):
        step = d.astype(np.float32) * scales[:, j // 16].astype(np.float32)
        whole = np.clip(np.rint(blocks[:, j] / np.maximum(step, 1e-9)) + 32, 0, 63).astype(np.int32)
        half, quarter, k = j // 128, j % 128 // 32, j % 32
        low = half * 64 + (quarter % 2) * 32 + k
        out[:, low] |= ((whole & 15) << (4 * (quarter // 2))).astype(np.uint8)
        out[:, 128 + half * 32 + k] |= ((whole >> 4) << (2 * quarter)).astype(np.uint8)
        restored[:, j] = step * (whole - 32).astype(np.float32)
    return out, restored


_WRITERS: Mapping[str, tuple[int, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]]] = {
    "Q8_0": (32, _write_q8_0),
    "Q4_0": (32, _write_q4_0),
    "Q4_K": (256, lambda blocks: _write_k(blocks, 4)),
    "Q5_K": (256, lambda blocks: _write_k(blocks, 5)),
    "Q6_K": (256, _write_q6_k),
}

_RENAMED = (
    (r"model\.layers\.", "blk."),
    (r"model\.embed_tokens", "token_embd"),
    (r"model\.norm", "output_norm"),
    (r"lm_head", "output"),
    (r"self_attn\.qkv_proj", "attn_qkv"),
    (r"self_attn\.([qkv])_(proj|norm)", lambda m: f"attn_{m[1]}" + ("_norm" if m[2] == "norm" else "")),
    (r"self_attn\.o_proj", "attn_output"),
    (r"input_layernorm", "attn_norm"),
    (r"pre_feedforward_layernorm", "ffn_norm"),
    (r"post_feedforward_layernorm", "post_ffw_norm"),
    (r"mlp\.gate_up_proj", "ffn_up"),
    (r"(mlp|block_sparse_moe)\.gate\b", "ffn_gate_inp"),
    (r"mlp\.experts\.\d+\.(gate|up|down)_proj", r"ffn_\1_exps"),
    (r"block_sparse_moe\.experts\.\d+\.w([123])", lambda m: f"ffn_{'gate down up'.split()[int(m[1]) - 1]}_exps"),
    (r"mlp\.(gate|up|down)_proj", r"ffn_\1"),
)


def stored_name(name: str, is_gemma: bool) -> str:
    """What llama.cpp calls a tensor of a checkpoint for transformers. Experts of a layer have one name."""
    name = re.sub("post_attention_layernorm", "post_attention_norm" if is_gemma else "ffn_norm", name)
    for pattern, new in _RENAMED:
        name = re.sub(pattern, new, name)
    return name


class Model:
    """A model as a GGUF file.

    Attributes:
        entries: Its metadata.
        tensors: Its tensors: type, shape and bytes.
        restored: The numbers of each tensor for transformers, as the file has them.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Tensors, kind_of: Callable[[str, int], str]):
        """Takes a config.json, and a function from a stored name and the length of a row to a type."""
        family = config["model_type"]
        architecture = {"mistral": "llama", "mixtral": "llama", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
        self.architecture = architecture.get(family, family)
        self.entries = _entries(config, self.architecture)
        self.tensors: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        self.restored: dict[str, np.ndarray] = {}
        is_gemma, parts = self.architecture == "gemma3", {}
        for name, numbers in tensors.items():
            stored = stored_name(name, is_gemma)
            adds_one = is_gemma and "norm" in name
            kind = "F32" if numbers.ndim == 1 else kind_of(stored, numbers.shape[-1])
            order = self._order(stored, numbers.shape[0], config)
            data, restored = rounded(numbers[order] + np.float32(adds_one), kind)
            self.restored[name] = restored[np.argsort(order)] - np.float32(adds_one)
            kind, _, before = parts.get(stored, (kind, 0, b""))
            parts[stored] = (kind, numbers.shape, before + data)
        for stored, (kind, shape, data) in parts.items():
            count = config.get("num_local_experts") or config.get("num_experts")
            self.tensors[stored] = (kind, (count, *shape) if "_exps" in stored else shape, data)

    def _order(self, stored: str, rows: int, config: Mapping[str, Any]) -> np.ndarray:
        """The rows of a tensor in the order of llama.cpp, whose rope turns neighbours in models of Llama."""
        which = re.search(r"attn_([qk])\.", stored)
        if which is None or self.architecture != "llama":
            return np.arange(rows)
        heads = config["num_attention_heads" if which[1] == "q" else "num_key_value_heads"]
        size = rows // heads
        return np.array(
            [h * size + half * (size // 2) + i for h in range(heads) for i in range(size // 2) for half in (0, 1)]
        )

    def add(self, name: str, numbers: Sequence[float]) -> None:
        """Adds a vector of float32."""
        self.tensors[name] = ("F32", (len(numbers),), np.asarray(numbers, np.float32).tobytes())

    def write(self, path: Path, **changes: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(container(self.entries, self.tensors, **changes))
        return path

    def write_split(self, folder: Path, count: int) -> list[Path]:
        """Several files, of which the first has the metadata and the others have tensors only."""
        names, paths = list(self.tensors), []
        folder.mkdir(parents=True, exist_ok=True)
        for i in range(count):
            own = {"split.no": i, "split.count": count, "split.tensors.count": len(names)}
            tensors = {name: self.tensors[name] for name in names[i::count]}
            paths.append(folder / f"m-{i + 1:05}-of-{count:05}.gguf")
            paths[-1].write_bytes(container((self.entries if i == 0 else {}) | own, tensors))
        return paths


def _entries(config: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The metadata of a config.json, as the converter of llama.cpp writes it."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    own = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps") or 1e-6),
        "rope.freq_base": float(rope.get("rope_theta") or config.get("rope_theta") or 1e4),
        "rope.dimension_count": int(head_dim * share),
        "rope.freq_base_swa": config.get("rope_local_base_freq"),
        "vocab_size": 512,
        "expert_count": config.get("num_local_experts") or config.get("num_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "attention.sliding_window": config.get("sliding_window") if config.get("use_sliding_window", True) else None,
    }
    kind = rope.get("rope_type") or rope.get("type")
    if kind in ("linear", "yarn"):
        own |= {"rope.scaling.type": kind, "rope.scaling.factor": float(rope["factor"])}
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    if original and kind in ("yarn", "longrope"):
        own["rope.scaling.original_context_length"] = original
    if kind == "longrope":
        growth = config["max_position_embeddings"] / original
        own["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(growth) / math.log(original))
    entries = {f"{architecture}.{name}": value for name, value in own.items() if value is not None}
    return {"general.architecture": architecture, "general.name": "a test", "general.file_type": 15, **entries}
