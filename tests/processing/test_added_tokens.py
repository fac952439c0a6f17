"""Added tokens with flags, beside `tokenizers`, which transformers finds them with."""

import json
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import tokenizers
from hypothesis import example, given
from tokenizers import models

from jsg.processing.added_tokens import FLAGS, AddedTokens
from jsg.processing.tokenizer import load_tokenizer
from jsg.processing.tokenizer_config import read_tokenizer_config
from tests.processing.sentencepieces import VOCAB, write

TOKENS = ("<x>", "<xy>", "<x><x>", "<a b>", "do", "dog", "b", " s", "ß")
WORDS = (*TOKENS, " ", "\n", "\x1c", "\x85", "\u3000", "\u200b", "\u200d", "a", "_", "-", "²", "\u0301", "Ⓐ", "‿", "😀")


@given(
    flags=st.dictionaries(st.sampled_from(TOKENS), st.sets(st.sampled_from(FLAGS)), min_size=1),
    text=st.lists(st.sampled_from(WORDS), max_size=8).map("".join),
)
@example(flags={"<x>": {"rstrip"}, "\n": {"lstrip"}}, text="<x>\na")
@example(flags={" ": {"lstrip", "rstrip"}}, text="a  \x85b")
def test_a_text_is_cut_as_tokenizers_cuts_it(flags: dict[str, set[str]], text: str):
    theirs = tokenizers.Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    for token, on in flags.items():
        theirs.add_tokens([tokenizers.AddedToken(token, **{name: name in on for name in FLAGS})])
    found = theirs.encode(text)
    expected = [
        (text[begin:end] if token_id == 0 else theirs.id_to_token(token_id), token_id != 0)
        for token_id, (begin, end) in zip(found.ids, found.offsets, strict=True)
    ]
    assert AddedTokens(flags, flags).split(text) == expected


def test_flags_stand_in_each_file_that_names_tokens(tmp_path: Path):
    on: dict[str, Any] = {"lstrip": True, "rstrip": True, "special": False}
    files = {
        "tokenizer_config.json": {
            "mask_token": {"content": "<mask>", "lstrip": True},
            "extra_special_tokens": {"image": {"content": "<i>", "rstrip": True, "normalized": True}},
            "added_tokens_decoder": {
                "9": {"content": "<a>", **on},
                "8": {"content": "<s>", "lstrip": True, "special": True},
            },
        },
        "special_tokens_map.json": {"bos_token": {"content": "<s>", "rstrip": True}, "eos_token": "</s>"},
        "added_tokens.json": {"<b>": 10, "</s>": 11},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert {token: set(flags) for token, flags in read_tokenizer_config(tmp_path).token_flags.items()} == {
        "<mask>": {"lstrip"},
        "<i>": {"rstrip", "normalized"},
        "<a>": {"lstrip", "rstrip", "normalized"},
        "<s>": {"lstrip"},
        "<b>": {"normalized"},
    }


@pytest.mark.parametrize("legacy", [False, True])
def test_a_sentencepiece_tokenizer_follows_them(tmp_path: Path, legacy: bool):
    decoder = {
        str(VOCAB): {"content": "<l>", "lstrip": True, "special": True},
        str(VOCAB + 1): {"content": "<r>", "rstrip": True, "special": True},
        str(VOCAB + 2): {"content": "do", "single_word": True, "special": False},
    }
    config = {"added_tokens_decoder": decoder, "legacy": legacy}
    tokenizer = load_tokenizer(write(tmp_path, {"tokenizer_config.json": config}))

    def ids(text: str, **how: Any) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, **how)

    assert ids("dog \n<l>") == [*ids("dog"), VOCAB]
    assert ids("dog<r> \n dog") == ids("dog<r>dog") != ids("dog<l> \n dog")
    assert ids("dog <r>") == [*ids("dog "), VOCAB + 1]
    assert (ids("a do").count(VOCAB + 2), ids("a dog").count(VOCAB + 2), ids("ado").count(VOCAB + 2)) == (1, 0, 0)
    assert VOCAB not in ids("dog <l>", parse_special=False)
    assert ids(" <l> x", continues=True)[0] == VOCAB
