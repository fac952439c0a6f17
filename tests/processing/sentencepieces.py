"""Directories whose tokenizer is a `tokenizer.model` and nothing else, trained here in a hundredth of a second."""

import io
import json
from pathlib import Path
from typing import Any

import sentencepiece

VOCAB = 300  # three control pieces, 256 bytes, and what the sentences have
SENTENCES = [
    "the lazy dog is a good dog. ",
    "Hello there, hello you. ",
    "USER: who are you? ASSISTANT: a model ",
] * 4
LLAMA: dict[str, Any] = {
    "model_type": "bpe",
    "vocab_size": VOCAB,
    "byte_fallback": True,
    "character_coverage": 1.0,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": True,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_digits": True,
}
"""How Llama's was trained, as its model says."""


def train(**changes: Any) -> bytes:
    """A small model, trained like Llama's."""
    model, sentences = io.BytesIO(), iter(SENTENCES)
    options = LLAMA | changes | {"minloglevel": 2, "num_threads": 1}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=sentences, model_writer=model, **options)
    return model.getvalue()


def write(directory: Path, files: dict[str, Any], **changes: Any) -> Path:
    """The model, and JSON files beside it."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.model").write_bytes(train(**changes))
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory


def _token(content: str) -> dict[str, Any]:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": content, **flags}


_MARKS = {"bos_token": _token("<s>"), "eos_token": _token("</s>"), "unk_token": _token("<unk>")}
_LLAMA_CONFIG: dict[str, Any] = {
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "pad_token": None,
    "sp_model_kwargs": {},
    "tokenizer_class": "LlamaTokenizer",
}

# As their publishers wrote them, lengths left out.
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama_1": {"tokenizer_config.json": _LLAMA_CONFIG | _MARKS},
    "llama_2": {
        "tokenizer_config.json": _LLAMA_CONFIG | _MARKS | {"legacy": False},
        "special_tokens_map.json": _MARKS,
    },
    "vicuna_1_5": {
        "tokenizer_config.json": _LLAMA_CONFIG | _MARKS | {"legacy": False, "padding_side": "right"},
        "special_tokens_map.json": _MARKS | {"pad_token": "<unk>"},
    },
    "mistral_0_1": {
        "tokenizer_config.json": _LLAMA_CONFIG
        | {
            "added_tokens_decoder": {
                str(i): _token(token) | {"special": True} for i, token in enumerate(["<unk>", "<s>", "</s>"])
            },
            "additional_special_tokens": [],
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "legacy": True,
            "spaces_between_special_tokens": False,
            "use_default_system_prompt": True,
        },
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    },
    "hermes": {
        "tokenizer_config.json": _LLAMA_CONFIG
        | {"bos_token": "<s>", "eos_token": "<|im_end|>", "legacy": True, "trust_remote_code": False}
        | {"additional_special_tokens": ["<|im_start|>", "</s>"]},
        "added_tokens.json": {"<|im_end|>": VOCAB, "<|im_start|>": VOCAB + 1},
        "special_tokens_map.json": {"bos_token": "<s>", "eos_token": "<|im_end|>"},
    },
}
