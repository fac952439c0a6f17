"""A small random model as Qwen3-Embedding is published, and texts for it.

Needs numpy, safetensors and tokenizers only, as `variants.py` does.
"""

import json
from pathlib import Path

import tokenizers
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.golden.variants import VARIANTS, random_tensors

SEED = 2026
END, TURN_BEGIN, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEXTS = (
    "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: What is a cat?",
    "A cat is a small animal that purrs.",
    "Ein Käfer läuft über 7 Blätter.",
    "",
    "x" * 200,
)
QUERY = "What is a cat?"
CONFIG = VARIANTS["qwen3"] | {"tie_word_embeddings": True}


def write_embedding_model(directory: Path, *, normalize: bool = True) -> Path:
    """The directory of a model that embeds: tensors without a head, tokenizer, and the modules around them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    tensors = random_tensors("qwen3", SEED)
    del tensors["lm_head.weight"]
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    write_tokenizer(directory)
    kinds = ["Transformer", "Pooling", "Normalize"][: 3 if normalize else 2]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    write_pooling(directory, "lasttoken")
    return directory


def write_pooling(directory: Path, mode: str) -> None:
    modes = {f"pooling_mode_{name}": name == mode for name in ("cls_token", "mean_tokens", "lasttoken")}
    config = {"word_embedding_dimension": CONFIG["hidden_size"], **modes, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))


def write_tokenizer(directory: Path) -> None:
    """Bytes, the words yes and no, and special tokens, of which one is put behind a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("y", "e"), ("ye", "s"), ("n", "o")]
    vocab = {piece: i for i, piece in enumerate([*alphabet, *("".join(pair) for pair in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, TURN_BEGIN, TURN_END])
    end = (END, tokenizer.token_to_id(END))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"$A {END}", pair=None, special_tokens=[end])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"eos_token": END, "pad_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
