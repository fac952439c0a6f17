"""Makes the checkpoint that all engines read: random weights in safetensors, and a tokenizer in `tokenizer.json`.

The tokenizer is byte-level BPE, trained on the source of Python's standard library, so its pieces are those of English
and of code. The weights are those of `bench.jump_forward`: the head prefers longer tokens, as that of a trained model
does, so that drafts of a grammar are not refused by chance.
"""

import json
import sysconfig
from pathlib import Path
from typing import Any

from bench.jump_forward import random_weights
from bench.shapes import HYBRID_SMALL, LLAMA_100M, LLAMA_500M, LLAMA_SMALL, write_model

SHAPES: dict[str, dict[str, Any]] = {"100m": LLAMA_100M, "500m": LLAMA_500M, "small": LLAMA_SMALL}
WEIGHTLESS: dict[str, dict[str, Any]] = {"hybrid-small": HYBRID_SMALL}
"""Shapes of which only this jsg makes a model, with `--load-format dummy`."""
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
MAX_SOURCE_BYTES = 400_000
DONE = "complete"


def make_checkpoint(directory: Path, name: str, num_positions: int | None = None) -> Path:
    """The directory of the model, which is made once; `num_positions` in place of those of the shape."""
    path = directory / (name if num_positions is None else f"{name}-{num_positions}")
    if not (path / DONE).exists():
        ids = {f"{token}_id": number for number, token in enumerate(SPECIAL)}
        shape: dict[str, Any] = (SHAPES | WEIGHTLESS)[name] | ids | {"dtype": "float32"}
        shape["max_position_embeddings"] = num_positions or shape["max_position_embeddings"]
        write_model(path, shape)
        lengths = _write_tokenizer(path, shape["vocab_size"])
        (path / "generation_config.json").write_text(json.dumps(ids), encoding="utf-8")
        if name in SHAPES:
            _write_weights(path, shape, lengths)
        (path / DONE).touch()
    return path


def _write_weights(path: Path, shape: dict[str, Any], lengths: list[int]) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    weights = random_weights(shape, np.array(lengths, np.float32))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(path: Path, vocab_size: int) -> list[int]:
    """Writes the tokenizer, and gives the bytes of each token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL.values()),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(file) for file in sources if file.stat().st_size < MAX_SOURCE_BYTES], trainer)
    assert tokenizer.get_vocab_size() == vocab_size, "the text is too short for a vocabulary of this size"
    tokenizer.save(str(path / "tokenizer.json"))
    settings = SPECIAL | {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda piece: piece[1])
    return [len(piece) for piece, _ in pieces]
