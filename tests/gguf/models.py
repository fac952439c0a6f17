"""Small models as GGUF files, and the same models with the numbers that are left, as a checkpoint for transformers."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.gguf.writer import Model
from tests.golden.variants import VARIANTS, WIDE, random_tensor, random_tensors, tensor_shapes

WIDEST = dict(zip(("blk.0.", "blk.1.", "blk.2."), ("Q4_K", "Q5_K", "Q6_K"), strict=True))
NARROW = ("Q8_0", "Q4_0", "BF16", "F16")
OWN = {"gemma3": {"query_pre_attn_scalar": 16}}
"""Fields of variants that a GGUF file cannot say otherwise."""


def config_of(variant: str) -> dict[str, Any]:
    return {**(VARIANTS | WIDE)[variant], **OWN.get(variant, {})}


def kind_of(stored: str, length: int) -> str:
    """Each layer has types of its own where rows are long enough."""
    if length % 256 == 0:
        return next((kind for start, kind in WIDEST.items() if stored.startswith(start)), "Q6_K")
    if length % 32 or "gate_inp" in stored:
        return "F32"
    return NARROW[sum(stored.encode()) % len(NARROW)]


def made(variant: str, kind_of: Callable[[str, int], str] = kind_of) -> Model:
    """A model of the golden variants, in all types or those of the function. It has a vocabulary of letters."""
    config = config_of(variant)
    if variant in VARIANTS:
        tensors = random_tensors(variant, 3)
    else:
        tensors = {name: random_tensor(name, name, shape) for name, shape in tensor_shapes(config).items()}
    model = Model(config, tensors, kind_of)
    scaling = config.get("rope_scaling") or {}
    for length in ("long", "short"):
        if f"{length}_factor" in scaling:
            model.add(f"rope_factors_{length}.weight", scaling[f"{length}_factor"])
    if scaling.get("rope_type") == "llama3":
        model.add("rope_freqs.weight", llama3_factors(scaling, config["rope_theta"], 8))
    if every := config.get("sliding_window_pattern"):
        windows = [bool((layer + 1) % every) for layer in range(config["num_hidden_layers"])]
        model.entries["gemma3.attention.sliding_window_pattern"] = windows
    model.entries |= byte_level(letters(), "llama-bpe", size=512, bos_token_id=1, eos_token_id=2)
    return model


def llama3_factors(scaling: dict[str, Any], theta: float, count: int) -> list[float]:
    """What each frequency is divided by, as the converter of llama.cpp computes it."""
    low, high, factor = (scaling[name] for name in ("low_freq_factor", "high_freq_factor", "factor"))
    factors = []
    for pair in range(count):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * theta ** (pair / count))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return factors


def write_twin(directory: Path, variant: str, model: Model) -> Path:
    """The checkpoint for transformers."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config_of(variant)))
    save_file(
        {name: np.ascontiguousarray(numbers) for name, numbers in model.restored.items()},
        directory / "model.safetensors",
    )
    return directory


def byte_level(tokenizer: tokenizers.Tokenizer, pre: str, *, size: int = 0, **more: Any) -> dict[str, Any]:
    """The metadata of a byte-level tokenizer, as the converter of llama.cpp writes it."""
    state = json.loads(tokenizer.to_str())
    added = {entry["id"]: entry for entry in state["added_tokens"]}
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    size = max(size, max(by_id) + 1)
    kinds = [
        3 if i in added and added[i]["special"] else 4 if i in added else 1 if i in by_id else 5 for i in range(size)
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [by_id.get(i, f"[PAD{i}]") for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


@functools.cache
def letters() -> tokenizers.Tokenizer:
    """A byte-level vocabulary of 300 tokens."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(["the lazy dog is a good dog, and the other one isn't. "] * 3, trainer)
    return tokenizer
