"""Kept tokens: a text that is cut and partly kept has the tokens that it has as a whole, and only for its namespace."""

import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from jsg.errors import ContextLengthError
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.speech.prompts import kept_tokens
from jsg.speech.prompts.kept_tokens import KeptTokens

PIECES = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool_call>", "ñandú", "<|im", "|>", "<", "</", "s>"),
    *(" ", "  ", "\n", "The quick brown fox", "naïve", "中文", "ꙮ", "\u0301", "12", "x" * 40),
)


def encoded(kept: KeptTokens, text: str, namespace: str = "", max_tokens: int | None = None) -> list[int]:
    return [*kept.encode(text, namespace, continues=False, max_tokens=max_tokens)]


def test_a_text_in_parts_has_the_tokens_of_the_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tokens, "LEAST_CHARS", 4)
    chance = random.Random(3)
    kept = KeptTokens(tokenizer)
    for _ in range(300):
        text = "".join(chance.choices(PIECES, k=chance.randint(0, 12)))
        whole = tokenizer.encode(text, add_special_tokens=False)
        assert encoded(kept, text) == whole, text
        assert encoded(kept, text) == whole, text  # with what is kept


def test_only_its_namespace_finds_a_text(all_tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **options: Any) -> list[int]:
        seen.extend([text] if text else [])
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    kept = KeptTokens(all_tokenizers["byte_level"])
    tools, question = "a tool " * 200, "<|im_end|><|im_start|>What?"
    for namespace, parts in (("a", [tools, question]), ("a", [question]), ("b", [tools, question])):
        seen.clear()
        encoded(kept, "<s>" + tools + question, namespace)
        assert seen == ["<s>", *parts]
    with pytest.raises(ContextLengthError):
        encoded(kept, "<s>" + tools, "a", max_tokens=10)
    monkeypatch.setattr(kept_tokens, "MOST_BYTES", 0)
    for _ in range(2):
        seen.clear()
        assert encoded(kept, tools + "!") == encode(all_tokenizers["byte_level"], tools + "!")
        assert seen == [tools + "!"]


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized", "first", None])
def test_where_neighbours_matter_nothing_is_cut(flag: str | None, tmp_path: Path) -> None:
    made = tokenizers.Tokenizer(models.BPE())
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if flag == "first":  # only the first text gets a space
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(prepend_scheme="first"), decoders.Metaspace()
    made.add_special_tokens([AddedToken("<A>", special=True)])
    made.add_tokens([AddedToken("<B>", **{"normalized": False, **({} if flag in ("first", None) else {flag: True})})])
    made.save(str(tmp_path / "tokenizer.json"))
    cuts = load_tokenizer(tmp_path).cuts
    assert (None if cuts is None else cuts.findall("a<A>b<B>")) == {"normalized": ["<A>"], None: ["<A>", "<B>"]}.get(
        flag
    )
