"""A tokenizer from metadata gives the ids of the tokenizer that the metadata was made of."""

import functools
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from jsg.models.config import read_spec
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.sources import resolve_model
from jsg.speech.prompts.chat_template import ChatTemplate
from tests.gguf.models import byte_level, made
from tests.processing.sentencepieces import SENTENCES, train

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLITS: dict[str, str | None] = {
    "llama-bpe": LLAMA_3,
    "dbrx": LLAMA_3,
    "qwen2": LLAMA_3.replace("{1,3}", ""),
    "gpt-4o": GPT_4O,
    "tekken": GPT_4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", ""),
    "smollm": None,
    "gpt-2": None,
}
"""Words as the published tokenizer.json of these models have them."""
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXTS = [
    "",
    "the lazy dog isn't 1234567 Good, DOG'S dogs  and\n\n\tThe end  ",
    "<|im_start|>user\nHello <tool_call>1</tool_call> there<|im_end|>\n dog</s>",
    "naïve cafe\u0301 😀 中文 3½ ² path/to/\r\n x",
    " <s>  two",
]
WORDS = st.sampled_from(
    [*SPECIAL, "<tool_call>", " ", "  ", "\n", "dog", "THE", "'s", "123", "é", "e\u0301", "😀", "/", "."]
)
TEXT = st.lists(WORDS | st.text(max_size=3), max_size=8).map("".join)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


@functools.cache
def trained(pre: str) -> tokenizers.Tokenizer:
    """A byte-level tokenizer as it was published, with a hole before its special tokens."""
    split = SPLITS[pre]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    if split is not None:
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    else:
        steps = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([*TEXTS, *SENTENCES] * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("<tool_call>", "</tool_call>")])
    return tokenizer


def loaded(folder: Path, entries: dict[str, Any], architecture: str = "qwen2") -> Tokenizer:
    model = made({"gemma3": "gemma3", "phi3": "phi3"}.get(architecture, "qwen2"))
    kept = {name: value for name, value in model.entries.items() if not name.startswith("tokenizer.")}
    model.entries = kept | entries
    return load_tokenizer(resolve_model(str(model.write(folder / "m.gguf"))))


@pytest.fixture(scope="module", params=SPLITS)
def byte_levels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    theirs = trained(request.param)
    bos = theirs.token_to_id("<s>")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        return loaded(tmp_path_factory.mktemp("model"), byte_level(theirs, request.param, bos_token_id=bos)), theirs


@settings(max_examples=40)
@given(text=st.sampled_from(TEXTS) | TEXT)
def test_byte_level_ids_are_those_of_the_published_tokenizer(byte_levels: Any, text: str):
    ours, theirs = byte_levels
    assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False).ids
    plain = tokenizers.Tokenizer.from_str(theirs.to_str())
    plain.encode_special_tokens = True
    assert ours.encode(text, add_special_tokens=False, parse_special=False) == plain.encode(text).ids
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == theirs.decode(ids)


def spm(model: bytes, **more: Any) -> dict[str, Any]:
    """The metadata of a sentencepiece model, as the converter of llama.cpp writes it."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = range(processor.get_piece_size())
    kinds = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in ids
    ]
    tokens, scores = [processor.id_to_piece(i) for i in ids], [processor.get_score(i) for i in ids]
    for token, kind in more.pop("added", {}).items():
        tokens, scores, kinds = [*tokens, token], [*scores, -1000.0], [*kinds, kind]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **{f"tokenizer.ggml.{name}": value for name, value in more.items()},
    }


@functools.cache
def published_llama(*, puts_space: bool = True) -> tokenizers.Tokenizer:
    """The tokenizer.json of Llama 2, or without the space in front of Gemma, with two more tokens."""
    from transformers import LlamaTokenizer

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tokenizer.model").write_bytes(train())
        theirs = LlamaTokenizer.from_pretrained(folder).backend_tokenizer
    spaces = normalizers.Replace(" ", "▁")
    theirs.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if puts_space else spaces
    theirs.pre_tokenizer = None
    if not puts_space:
        theirs.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    theirs.add_special_tokens([AddedToken("<|im_start|>", normalized=False)])
    theirs.add_tokens([AddedToken("<tool>", normalized=False)])
    return theirs


@pytest.fixture(scope="module", params=[True, False])
def pieces(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    entries = spm(train(), added={"<|im_start|>": 3, "<tool>": 4}, add_space_prefix=request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        return loaded(tmp_path_factory.mktemp("model"), entries), published_llama(puts_space=request.param)


@settings(max_examples=100)
@given(text=st.sampled_from(TEXTS) | TEXT | st.lists(st.sampled_from(["<tool>", "<s>", " ", "dog", "é"])).map("".join))
def test_sentencepiece_ids_are_those_of_the_published_tokenizer(pieces: Any, text: str):
    ours, theirs = pieces
    ids = theirs.encode(text, add_special_tokens=False).ids
    assert ours.encode(text, add_special_tokens=False) == ids and ours.encode(text) == [1, *ids]
    assert ours.decode(ids) == theirs.decode(ids)


def test_a_published_vocabulary_gives_the_ids_of_its_library(tmp_path: Path):
    """32 768 tokens of Mistral, whose scores are its own."""
    model = (files("mistral_common") / "data" / "mistral_instruct_tokenizer_240323.model.v3").read_bytes()
    library = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = loaded(tmp_path, spm(model), "llama")
    for text in (*TEXTS, Path(__file__).read_text(encoding="utf-8")):
        assert ours.encode(text, add_special_tokens=False, parse_special=False) == library.encode(text)


def test_gemma_goes_by_the_order_of_tokens_and_has_runs_of_spaces(tmp_path: Path):
    """As the converter writes it: a run of spaces is user-defined, and is spaces."""
    entries = spm(train(), added={"   ": 4, "\n\n": 4, "<start_of_turn>": 3}, add_space_prefix=False)
    entries["tokenizer.ggml.scores"] = [0.0] * len(entries["tokenizer.ggml.tokens"])
    ours = loaded(tmp_path, entries, "gemma3")
    by_order = published_llama(puts_space=False)
    for text in ("the lazy dog", "Hello there, who are you?"):
        assert ours.encode(text, add_special_tokens=False) == by_order.encode(text, add_special_tokens=False).ids
    three, lines = ours.token_id("▁▁▁"), ours.token_id("\n\n")
    assert ours.encode("a   a\n\na", add_special_tokens=False)[1::2] == [three, lines]
    assert ours.decode([three, lines]) == "   \n\n"


def test_phi_3_takes_the_spaces_after_its_marks(tmp_path: Path):
    ours = loaded(tmp_path, spm(train(), added={"<|user|>": 3, "<|endoftext|>": 3}), "phi3")
    ids = {token: ours.token_id(token) for token in ("<|user|>", "<|endoftext|>")}
    plain = ours.encode("dog", add_special_tokens=False)
    assert ours.encode("<|user|>\n dog", add_special_tokens=False) == [ids["<|user|>"], *plain]
    assert len(ours.encode("<|endoftext|> dog", add_special_tokens=False)) == 1 + len(plain) + 1


@pytest.mark.parametrize(
    ("pre", "more", "first"),
    [("llama-bpe", {}, True), ("llama-bpe", {"add_bos_token": False}, False), ("qwen2", {}, False)],
)
def test_bos_comes_first_where_the_file_or_its_kind_says_so(
    pre: str, more: dict[str, Any], first: bool, tmp_path: Path
):
    theirs = trained(pre)
    bos = theirs.token_to_id("<s>")
    ours = loaded(tmp_path, byte_level(theirs, pre, bos_token_id=bos, **more))
    assert ours.encode("dog")[: 1 + first] == [bos, *theirs.encode("dog").ids][1 - first :][: 1 + first]


def test_the_template_and_what_ends_an_answer(tmp_path: Path):
    theirs = trained("qwen2")
    model = made("qwen2")
    ids = {token: theirs.token_to_id(token) for token in SPECIAL}
    roles = {"bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"], "eot_token_id": 7}
    model.entries |= byte_level(theirs, "qwen2", **roles) | {"tokenizer.chat_template": TEMPLATE}
    directory = resolve_model(str(model.write(tmp_path / "m.gguf")))
    tokenizer = load_tokenizer(directory)
    assert tokenizer.chat_template == TEMPLATE
    template = ChatTemplate(tokenizer.chat_template, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    rendered = template.render([{"role": "user", "content": "dog"}])
    assert rendered == "<s><|im_start|>user\ndog<|im_end|>\n"
    spec = read_spec(directory)
    assert spec.bos_token_id == ids["<s>"] and set(spec.eos_token_ids) == {7, ids["</s>"], ids["<|im_end|>"]}
