import functools
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sentencepiece
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jsg.errors import ModelError, RequestError
from jsg.processing.tokenizer import Tokenizer, load_tokenizer, vocabulary_bytes

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two spaces",
    "tabs\tand\nlines\n\n",
    "naïve café 中文字符 😀 👩‍👩‍👧 ꙮ \x00",
    "punctuation , is . not ' s tidied",
]
PROPERTY = settings(deadline=None, derandomize=True, max_examples=50)


@functools.cache
def _json_library(directory: Path) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    library.no_truncation()
    library.no_padding()
    return library


@functools.cache
def _sentencepiece_library(directory: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))


def _library_encode(kind: str, directory: Path, text: str) -> list[int]:
    if kind == "sentencepiece":
        return _sentencepiece_library(directory).encode(text)
    return _json_library(directory).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", TEXTS)
def test_encode_equals_the_library_and_decode_gives_the_text_back(
    kind: str, tokenizer: Tokenizer, directories: dict[str, Path], text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == _library_encode(kind, directories[kind], text)
    assert tokenizer.decode(ids) == text


def test_other_threads_get_their_turns_while_a_large_text_is_encoded(tokenizer: Tokenizer) -> None:
    text = "".join(TEXTS[2:]) * 4_000
    num_turns = 0
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(tokenizer.encode, text)
        while not encoding.done():
            time.sleep(0.001)
            num_turns += 1
    assert encoding.result()
    assert num_turns > 20


@PROPERTY
@given(text=st.text(max_size=40))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    # The published sentencepiece model normalises nothing, but has no way to write its own space mark.
    assume("▁" not in text)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False, parse_special=False)) == text


@PROPERTY
@given(data=st.data())
@pytest.mark.parametrize("skip", [True, False])
def test_decode_of_random_ids_equals_tokenizers(
    all_tokenizers: dict[str, Tokenizer], directories: dict[str, Path], skip: bool, data: st.DataObject
) -> None:
    kind = data.draw(st.sampled_from(["byte_level", "llama", "gemma"]))
    ours = all_tokenizers[kind]
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size + 3), max_size=12))
    library = _json_library(directories[kind])
    # The library reads added tokens outside ASCII as if they were in the byte-level alphabet; we do not.
    assume(library.token_to_id("ñandú") not in ids)
    text = library.decode(ids, skip_special_tokens=skip)
    # In byte-fallback tokenizers the libraries and we count U+FFFD differently (see `pieces.py`).
    assume(kind == "byte_level" or "\ufffd" not in text)
    assert ours.decode(ids, skip_special_tokens=skip) == text


@PROPERTY
@given(data=st.data())
def test_decode_of_random_ids_equals_sentencepiece(
    all_tokenizers: dict[str, Tokenizer], directories: dict[str, Path], data: st.DataObject
) -> None:
    library = _sentencepiece_library(directories["sentencepiece"])
    ids = data.draw(st.lists(st.integers(1, library.vocab_size() - 1), max_size=12))
    text = library.decode(ids)
    # A space as a byte token in front is the one that sentencepiece does not take off.
    assume("\ufffd" not in text and not text.startswith(" "))
    assert all_tokenizers["sentencepiece"].decode(ids) == text


def test_spells_the_odd_tokens(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    added = tokenizer.token_id("ñandú")
    assert added is not None
    assert tokenizer.token_bytes(added) == "ñandú".encode() and tokenizer.decode([added]) == "ñandú"
    assert tokenizer.token_bytes(-1) == tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.decode([10**9, -1]) == ""
    llama = all_tokenizers["llama"]
    assert llama.token_bytes(llama.token_id("<0xF0>") or 0) == b"\xf0"


def test_vocabulary_bytes_make_every_text_and_leave_out_special_tokens(tokenizer: Tokenizer) -> None:
    table = vocabulary_bytes(tokenizer)
    assert len(table) == tokenizer.vocab_size and all(table[i] == b"" for i in tokenizer.special_ids)
    text = "a naïve 😀 text"
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    space = " " if tokenizer.strips_leading_space else ""
    assert b"".join(table[i] for i in ids) == (space + text).encode()
    assert {bytes([byte]) for byte in range(256) if byte not in (0xC0, 0xC1, *range(0xF5, 0x100))} <= set(table)


def test_special_tokens_are_read_only_when_asked(tokenizer: Tokenizer, kind: str) -> None:
    marker = "[INST]" if kind == "sentencepiece" else "<|im_start|>"
    marker_id = tokenizer.token_id(marker)
    assert marker_id in tokenizer.special_ids
    text = f"{marker}hi"
    assert tokenizer.encode(text, add_special_tokens=False)[0] == marker_id
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert not tokenizer.special_ids & set(plain) and tokenizer.decode(plain) == text
    assert tokenizer.decode([marker_id, *plain], skip_special_tokens=False).startswith(marker)


def test_bos_comes_as_the_checkpoint_says(directories: dict[str, Path], tmp_path: Path) -> None:
    def loaded(kind: str, **config: object) -> Tokenizer:
        directory = tmp_path / f"{kind}{len(list(tmp_path.iterdir()))}"
        shutil.copytree(directories[kind], directory)
        path = directory / "tokenizer_config.json"
        fields = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(fields | config))
        return load_tokenizer(directory)

    for kind, starts_with_bos in {"byte_level": False, "llama": True, "sentencepiece": True}.items():
        for said, expected in {None: starts_with_bos, True: True, False: False}.items():
            tokenizer = loaded(kind, add_bos_token=said)
            bare = tokenizer.encode("hi", add_special_tokens=False)
            before = [tokenizer.bos_token_id] if expected else []
            assert tokenizer.encode("hi") == [*before, *bare], (kind, said)
            assert tokenizer.encode("") == before
    with_eos = loaded("llama", add_eos_token=True)
    assert with_eos.encode("hi")[-1] == with_eos.eos_token_id
    assert (with_eos.bos_token, with_eos.eos_token) == ("<s>", "</s>")


def test_sentencepiece_segments_agree_with_the_publisher(all_tokenizers: dict[str, Tokenizer]) -> None:
    from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
    from mistral_common.protocol.instruct.request import ChatCompletionRequest
    from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

    messages = [UserMessage(content="Hi 😀"), AssistantMessage(content="Hello."), UserMessage(content="More")]
    official = MistralTokenizer.v3().encode_chat_completion(ChatCompletionRequest(messages=messages)).tokens
    text = "<s>[INST]Hi 😀[/INST]Hello.</s>[INST]More[/INST]"
    assert all_tokenizers["sentencepiece"].encode(text, add_special_tokens=False) == official


def test_sentencepiece_knows_tokens_added_later(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(directories["sentencepiece"], tmp_path, dirs_exist_ok=True)
    added = {"32768": {"content": "<pad>", "special": True}, "32769": {"content": "<call>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 32770
    ids = tokenizer.encode("<call>x<pad>", add_special_tokens=False)
    assert (ids[0], ids[-1]) == (32769, 32768)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<call> x"
    assert (32768 in tokenizer.special_ids, 32769 in tokenizer.special_ids) == (True, False)


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"{text} {i}" for i in range(40) for text in TEXTS]

    def round_trip(text: str) -> str:
        parsed = tokenizer.decode(tokenizer.encode(text))
        assert parsed == tokenizer.decode(tokenizer.encode(text, parse_special=False))
        return parsed

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == texts


def test_refuses_a_lone_surrogate(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match=r"character 1 is the lone surrogate U\+D800"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize(
    ("template_files", "expected"),
    [
        ({}, None),
        ({"tokenizer_config.json": json.dumps({"chat_template": "config"})}, "config"),
        ({"chat_template.json": json.dumps({"chat_template": "json"})}, "json"),
        ({"tokenizer_config.json": json.dumps({"chat_template": "config"}), "chat_template.jinja": "file"}, "file"),
        (
            {
                "tokenizer_config.json": json.dumps(
                    {"chat_template": [{"name": "tool", "template": "t"}, {"name": "default", "template": "d"}]}
                )
            },
            "d",
        ),
    ],
)
def test_finds_the_chat_template(
    directories: dict[str, Path], tmp_path: Path, template_files: dict[str, str], expected: str | None
) -> None:
    shutil.copyfile(directories["llama"] / "tokenizer.json", tmp_path / "tokenizer.json")
    for name, text in template_files.items():
        (tmp_path / name).write_text(text)
    assert load_tokenizer(tmp_path).chat_template == expected


def test_damaged_and_unknown_files_are_model_errors_without_a_path(
    directories: dict[str, Path], tmp_path: Path
) -> None:
    library = tokenizers.Tokenizer.from_file(str(directories["llama"] / "tokenizer.json"))
    library.decoder = tokenizers.decoders.WordPiece()
    cases = {
        "tokenizer.json": ["{", "{}", library.to_str()],
        "tokenizer.model": ["nonsense"],
        "tokenizer_config.json": ["[]", "{"],
        "other": [""],
    }
    for name, texts in cases.items():
        for index, text in enumerate(texts):
            directory = tmp_path / f"{name}{index}"
            directory.mkdir()
            (directory / name).write_text(text)
            with pytest.raises(ModelError) as raised:
                load_tokenizer(directory)
            assert str(tmp_path) not in str(raised.value)


def test_an_absurd_token_id_is_refused(directories: dict[str, Path], tmp_path: Path) -> None:
    shutil.copytree(directories["sentencepiece"], tmp_path, dirs_exist_ok=True)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<far>": 10**12}))
    with pytest.raises(ModelError, match=r"below 16777216, but one is 10{12}"):
        load_tokenizer(tmp_path)


def test_older_formats_go_through_transformers(tmp_path: Path) -> None:
    from jsg.processing.pieces import _byte_level_alphabet

    vocabulary = dict(_byte_level_alphabet()) | {"hi": 256, "<|endoftext|>": 257}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    fields = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("hi é") == [256, *"hi é".encode()[2:]] and tokenizer.eos_token_id == 257
    assert tokenizer.decode([256, 257]) == "hi"


def test_code_in_a_model_directory_is_never_run(tmp_path: Path) -> None:
    """`auto_map` names classes of the model's own files, which other software imports."""
    marker = tmp_path / "it-ran"
    code = f"open({str(marker)!r}, 'w')\nclass Config: pass\nclass Words: pass\n"
    for name in ("configuration_own.py", "tokenization_own.py", "__init__.py"):
        (tmp_path / name).write_text(code)
    own = {"AutoConfig": "configuration_own.Config", "AutoTokenizer": ["tokenization_own.Words", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": own}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Words", "auto_map": own}))
    with pytest.raises(ModelError, match="without running code of the model"):
        load_tokenizer(tmp_path)
    assert not marker.exists()


def test_loading_imports_neither_jax_nor_transformers(directories: dict[str, Path]) -> None:
    program = (
        "import sys; from pathlib import Path; from jsg.processing.tokenizer import load_tokenizer\n"
        "import jsg.speech.answers.answer_stream, jsg.speech.prompts.chat_template, jsg.sources\n"
        "load_tokenizer(Path(sys.argv[1]))\n"
        "print([name for name in ('jax', 'transformers', 'huggingface_hub') if name in sys.modules])"
    )
    command = [sys.executable, "-c", program, str(directories["llama"])]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "[]"
