"""Checkpoints with a `tokenizer.model` and no `tokenizer.json`: Llama 1 and 2, Vicuna, Mistral 0.1 and their kin."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jsg.errors import RequestError
from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.tokenizer import Tokenizer, load_tokenizer, vocabulary_bytes
from jsg.speech.prompts.chat_template import ChatTemplate
from tests.processing.sentencepieces import PUBLISHED, VOCAB, write
from tests.test_layout import ROOT

TEXTS = [
    "",
    "Hello there",
    "Hello 😀 dog",
    "x</s>hello",
    "<s>Hello</s>you</s>dog",
    "two  spaces\n\nlines\t",
    "é<unk>é",
    "<|im_start|>user\nhi<|im_end|>\n dog",
]
Maker = Callable[..., Tokenizer]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("published")
    return {name: write(root / name, files) for name, files in PUBLISHED.items()}


@pytest.fixture(scope="module")
def tokenizers(published: dict[str, Path]) -> dict[str, Tokenizer]:
    return {name: load_tokenizer(directory) for name, directory in published.items()}


@pytest.fixture
def make(tmp_path: Path) -> Maker:
    """A tokenizer trained with these options, of the fields of a `tokenizer_config.json`."""

    def make(fields: dict[str, Any], **options: Any) -> Tokenizer:
        return load_tokenizer(write(tmp_path / "made", {"tokenizer_config.json": fields}, **options))

    return make


@functools.cache
def hugging_face(directory: Path) -> Any:
    """Where nothing is said, transformers 5 takes the newer way and 4 the older; these files are older than both."""
    from transformers import LlamaTokenizer

    config = json.loads((directory / "tokenizer_config.json").read_text())
    return LlamaTokenizer.from_pretrained(directory, legacy=config.get("legacy", True))


def pieces(tokenizer: Tokenizer, text: str, **how: Any) -> list[str]:
    """The tokens of a text, as text."""
    return [tokenizer.token_bytes(i).decode(errors="replace") for i in tokenizer.encode(text, **how)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_and_text_are_those_of_hugging_face(published, tokenizers, name: str):
    theirs, ours = hugging_face(published[name]), tokenizers[name]
    for text in TEXTS:
        ids = theirs(text)["input_ids"]
        assert ours.encode(text) == ids, text
        assert ours.encode(text, add_special_tokens=False) == ids[1:]
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", PUBLISHED)
@given(text=st.text(max_size=20))
def test_any_text_comes_back_token_by_token(tokenizers, name: str, text: str):
    """Characters that training never saw are bytes, and come whole with the last of theirs."""
    text = text.replace("▁", "").replace("\ufffd", "")
    tokenizer: Tokenizer = tokenizers[name]
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert b"".join(vocabulary_bytes(tokenizer)[i] for i in ids) == (f" {text}" if text else "").encode()
    detokenizer, shown = IncrementalDetokenizer(tokenizer, skip_special_tokens=True), ""
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert shown == text == tokenizer.decode(ids)


def test_the_space_in_front_comes_once(tokenizers):
    """In front of a text, not of what goes on; behind a special token only in the older way."""
    for name in PUBLISHED:
        tokenizer: Tokenizer = tokenizers[name]
        again = ["</s>", " do"] if name not in ("llama_2", "vicuna_1_5") else ["</s>", "do"]
        assert pieces(tokenizer, "dog") == ["<s>", " ", "dog"]
        assert pieces(tokenizer, "dog", add_special_tokens=False, continues=True) == ["dog"]
        assert "".join(pieces(tokenizer, "a</s>do", continues=True)).endswith("".join(again))
        prompt = tokenizer.encode("dog")
        for tail, expected in ((prompt, " dog"), (prompt[:1], "dog")):
            detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, prompt_tail_ids=tail)
            assert detokenizer.push(tokenizer.encode("dog", add_special_tokens=False)) == expected


@pytest.mark.parametrize(("fields", "options"), [({"add_prefix_space": False}, {}), ({}, {"add_dummy_prefix": False})])
def test_no_space_where_the_checkpoint_puts_none(make: Maker, fields: dict, options: dict):
    tokenizer = make(fields, **options)
    assert pieces(tokenizer, "dog</s>dog") == ["<s>", "dog", "</s>", "dog"]
    assert tokenizer.decode(tokenizer.encode(" dog")) == " dog"


def test_tokens_added_later_stand_in_the_older_files(tokenizers):
    tokenizer: Tokenizer = tokenizers["hermes"]
    end, start = VOCAB, VOCAB + 1
    assert tokenizer.vocab_size == VOCAB + 2
    assert (tokenizer.eos_token_id, tokenizer.token_id("<|im_start|>")) == (end, start)
    assert {end, start} <= tokenizer.special_ids
    ids = tokenizer.encode("<|im_start|>dog<|im_end|>", add_special_tokens=False)
    assert (ids[0], ids[-1], tokenizer.decode(ids)) == (start, end, "dog")
    plain = tokenizer.encode("<|im_start|>dog<|im_end|>", parse_special=False)
    assert not {end, start} & set(plain)


@pytest.mark.parametrize("field", ["additional_special_tokens", "extra_special_tokens"])
@pytest.mark.parametrize("listed", [["<x>"], [{"content": "<x>"}]])
def test_listed_tokens_are_special(make: Maker, field: str, listed: list):
    added = {str(VOCAB): {"content": "<x>"}, str(VOCAB + 1): {"content": "<y>"}}
    tokenizer = make({field: listed, "added_tokens_decoder": added})
    assert tokenizer.decode(tokenizer.encode("<x>dog<y>")) == "dog<y>"


def test_a_trained_token_that_is_listed_is_read_whole(make: Maker):
    """A model's piece may be registered as a token of its own: no text joins it."""
    do = make({}).token_id("do")
    tokenizer = make({"added_tokens_decoder": {str(do): {"content": "do"}}, "legacy": False})
    assert pieces(tokenizer, "a dog") == ["<s>", " a", " ", "do", "g"]
    assert pieces(tokenizer, "a dog", parse_special=False) == ["<s>", " a", " ", "dog"]
    assert tokenizer.decode(tokenizer.encode("a dog")) == "a dog"


def test_a_users_text_opens_no_turn_where_sentencepiece_would_read_one(make: Maker):
    """Gemma's turn markers, for instance, are user-defined symbols, which sentencepiece reads in any text."""
    turn = "<start_of_turn>"
    fields = {"additional_special_tokens": [turn]}
    tokenizer = make(fields, user_defined_symbols=[turn, "<kept>"], vocab_size=VOCAB + 2)
    turn_id, kept_id = tokenizer.token_id(turn), tokenizer.token_id("<kept>")
    assert {turn_id, kept_id} <= set(tokenizer.encode(f"{turn}<kept>dog"))
    for text in (f"{turn}user", f"a {turn}{turn} <kept>dog", "dog"):
        ids = tokenizer.encode(text, parse_special=False)
        assert turn_id not in ids
        assert (kept_id in ids) == ("<kept>" in text)
        assert tokenizer.decode(ids) == text


def test_vicuna_has_no_chat_template_until_it_is_put_beside_it(published, tmp_path: Path):
    tokenizer = load_tokenizer(published["vicuna_1_5"])
    assert tokenizer.chat_template is None
    messages = [{"role": role, "content": content} for role, content in (("user", "Hi"), ("assistant", "Yes?"))]
    with pytest.raises(RequestError, match=r"chat_template\.jinja"):
        ChatTemplate(None, bos_token="<s>", eos_token="</s>").render(messages)
    directory = write(tmp_path / "vicuna", PUBLISHED["vicuna_1_5"])
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    (directory / "chat_template.jinja").write_text(page.split("```jinja\n")[1].split("```")[0])
    tokenizer = load_tokenizer(directory)
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    conversation = [{"role": "system", "content": "Be brief."}, *messages, {"role": "user", "content": "And?"}]
    told = "<s>Be brief. USER: Hi ASSISTANT: Yes?</s>USER: And? ASSISTANT:"
    assert template.render(conversation) == told
    ids = tokenizer.encode(told, add_special_tokens=False)
    assert (ids.count(1), ids.count(2)) == (1, 1)
    assert tokenizer.decode(ids, skip_special_tokens=False) == told
