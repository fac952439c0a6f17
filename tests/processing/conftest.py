"""Tokenizers of every kind the package reads: trained here, or published inside `mistral_common`."""

import json
import shutil
from importlib.resources import files
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jsg.processing.tokenizer import Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "def main():\n    return {'key': [1, 2, 3]}\n",
    "naïve café, Übergröße; 中文字符 and русский текст; 😀 👩‍👩‍👧 ꙮ",
    "a stop string such as END or </answer> may begin and not end",
] * 4
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
KINDS = ["byte_level", "llama", "gemma", "sentencepiece"]


def _save(tokenizer: tokenizers.Tokenizer, directory: Path, **config: object) -> Path:
    directory.mkdir()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("<tool_call>"), AddedToken("ñandú")])
    tokenizer.save(str(directory / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    return directory


def _byte_level(directory: Path) -> Path:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    # As saved after training; loading must undo both.
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    return _save(tokenizer, directory, chat_template="{{ messages[0].content }}")


def _sentencepiece_like(directory: Path, *, puts_space: bool) -> Path:
    """Llama-2's layout with `puts_space`, Gemma's without."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if puts_space else "never")
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *byte_tokens], limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if puts_space else replace
    strip = [decoders.Strip(" ", 1, 0)] if puts_space else []
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(steps)
    _save(tokenizer, directory)
    bos_id = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos_id)])
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def _published_sentencepiece(directory: Path) -> Path:
    directory.mkdir()
    source = files("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3"
    shutil.copyfile(str(source), directory / "tokenizer.model")
    return directory


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind → model directory."""
    root = tmp_path_factory.mktemp("tokenizers")
    return {
        "byte_level": _byte_level(root / "byte_level"),
        "llama": _sentencepiece_like(root / "llama", puts_space=True),
        "gemma": _sentencepiece_like(root / "gemma", puts_space=False),
        "sentencepiece": _published_sentencepiece(root / "sentencepiece"),
    }


@pytest.fixture(scope="session")
def all_tokenizers(directories: dict[str, Path]) -> dict[str, Tokenizer]:
    """Kind → loaded tokenizer."""
    return {kind: load_tokenizer(directory) for kind, directory in directories.items()}


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def tokenizer(kind: str, all_tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return all_tokenizers[kind]
