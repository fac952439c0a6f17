"""The half of the recorder that imports torch: one file per variant. Started by `record.py`."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.golden.other_families import OTHERS
from tests.golden.variants import (
    ROPES,
    SHAPES,
    VARIANTS,
    VOCAB,
    random_tensors,
    random_tokens,
    weights_sha256,
    write_checkpoint,
)

FIRST_SEED = 2026
PREFILL_LEN = 120  # beyond every sliding window, and longer than one query tile
PROMPT_LEN = 40
GREEDY_LEN = 60
COLUMNS = np.arange(0, VOCAB, 7)
WHOLE_POSITIONS = np.array([0, 1, 31, 32, 63, 64, 96, PREFILL_LEN - 1])
MIN_MARGIN = 1e-3
MIN_DISTINCT_TOKENS = 20


def main(directory: Path, variants: list[str]) -> None:
    torch.set_num_threads(1)
    for variant in variants:
        if variant in OTHERS:
            write_shapes(variant)
        seed = FIRST_SEED
        while (arrays := record(variant, seed)) is None:
            seed += 1
        target = directory / f"{variant}.npz"
        np.savez_compressed(target, **arrays)
        print(f"{variant}: {target.stat().st_size} bytes")
    np.savez_compressed(directory / "ropes.npz", **{name: frequencies(config) for name, config in ROPES.items()})


def write_shapes(variant: str) -> None:
    """Adds to `SHAPES` what tensors a checkpoint of this variant has, in the form in which it is published."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        (path / "config.json").write_text(json.dumps(VARIANTS[variant]))
        _model_class(variant)(AutoConfig.from_pretrained(path)).save_pretrained(path)
        with safe_open(path / "model.safetensors", "np") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 # a method
    shapes = (json.loads(SHAPES.read_text()) if SHAPES.exists() else {}) | {variant: found}
    lines = (f"{json.dumps(name)}: {json.dumps(shapes[name], sort_keys=True)}" for name in sorted(shapes))
    SHAPES.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def record(variant: str, seed: int) -> dict[str, Any] | None:
    """What the file holds; None if the greedy continuation of this seed is too near to a tie, or repeats itself."""
    tensors = random_tensors(variant, seed)
    model = load(variant, tensors)
    tokens = random_tokens(variant, seed, PREFILL_LEN)
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].numpy()
        prompt = torch.tensor([tokens[:PROMPT_LEN]])
        length = {"max_new_tokens": GREEDY_LEN, "min_new_tokens": GREEDY_LEN}
        ids = {"eos_token_id": None, "pad_token_id": 0}
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, **length, **ids)[0]
        top = model(output[None]).logits[0, PROMPT_LEN - 1 : -1].topk(2).values
    margin = float((top[:, 0] - top[:, 1]).min())
    greedy = output[PROMPT_LEN:].tolist()
    print(f"{variant}: seed {seed}, std {logits.std():.3f}, margin {margin:.5f}, {len(set(greedy))} distinct tokens")
    if margin < MIN_MARGIN or len(set(greedy)) < MIN_DISTINCT_TOKENS:
        return None
    note = {
        "config": VARIANTS[variant],
        "seed": seed,
        "weights_sha256": weights_sha256(tensors),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "logits_std": float(logits.std()),
        "smallest_greedy_margin": margin,
    }
    return {
        "note": np.array(json.dumps(note)),
        "tokens": np.array(tokens, np.int32),
        "columns": COLUMNS,
        "column_logits": logits[:, COLUMNS],
        "whole_positions": WHOLE_POSITIONS,
        "whole_logits": logits[WHOLE_POSITIONS],
        "prompt_len": np.array(PROMPT_LEN),
        "greedy": np.array(greedy, np.int32),
    }


def frequencies(config: dict[str, Any]) -> np.ndarray:
    """Radians per position, and last, what cos and sin are multiplied by."""
    rope = LlamaRotaryEmbedding(LlamaConfig(**config))
    return np.append(rope.inv_freq.numpy(), np.float32(rope.attention_scaling))


def load(variant: str, tensors: dict[str, np.ndarray]) -> torch.nn.Module:
    """The Hugging Face model; stops if one tensor does not fit it."""
    with tempfile.TemporaryDirectory() as directory:
        write_checkpoint(Path(directory), variant, tensors)
        model, report = _model_class(variant).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    problems = {name: found for name, found in report.items() if found}
    if problems:
        sys.exit(f"{variant}: the checkpoint does not fit the implementation: {problems}")
    return model


def _model_class(variant: str) -> Any:
    return getattr(transformers, VARIANTS[variant]["architectures"][0])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
