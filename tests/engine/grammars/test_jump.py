"""How forced text becomes tokens: as the tokenizer writes it if that is possible, and always with the same text."""

import functools
import pathlib
from typing import Any

import mistral_common
import pytest

from jsg.constrained.run.vocab import Vocabulary
from jsg.engine.grammars.jump import MAX_BYTES, Tokens, _whole_characters
from jsg.engine.grammars.kernel_folder import KernelFolder
from jsg.engine.grammars.lexicon import Lexicon, LexiconLoader
from jsg.errors import RequestError
from jsg.processing.tokenizer import load_tokenizer, vocabulary_bytes
from jsg.sources import resolve_model
from tests.engine import lettered

TEXT = '{"name": "Zoë", "house": "Gryffindor"}'


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def lexicon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Lexicon:
    if request.param == "byte-level":
        directory = resolve_model("tiny")
    else:
        directory = tmp_path_factory.mktemp("sentencepiece")
        data = pathlib.Path(mistral_common.__file__).parent / "data"
        (directory / "tokenizer.model").write_bytes(next(data.glob("*.model.v3")).read_bytes())
    tokenizer = load_tokenizer(directory)
    encode = functools.partial(tokenizer.encode, add_special_tokens=False, parse_special=False)
    vocabulary = Vocabulary(vocabulary_bytes(tokenizer), tokenizer.special_ids, [2])
    return Lexicon(encode, tokenizer.strips_leading_space, vocabulary)


def spell(lexicon: Lexicon, tokens: Any) -> bytes:
    return b"".join(lexicon.vocabulary.text_of(token) for token in tokens)


def test_goes_on_as_the_tokenizer_would(lexicon: Lexicon):
    before, tokens = lexicon.encode("So:"), lexicon.encode("So:" + TEXT)
    assert tokens[: len(before)] == before
    cutter, start = Tokens(lexicon), len(before)
    for index in range(start, len(tokens)):
        forced = spell(lexicon, tokens[index:])
        assert list(cutter.continuing(tokens[start:index], forced)) == tokens[index:]


def test_every_cut_says_the_text(lexicon: Lexicon):
    """Whatever stands before it, characters that the cut goes through included."""
    cutter, data = Tokens(lexicon), ("naïve 日本 🙂 " + TEXT).encode()
    for cut in range(len(data)):
        before = cutter._longest_match(data[:cut])
        assert spell(lexicon, before) == data[:cut]
        assert spell(lexicon, cutter.continuing(before, data[cut:])) == data[cut:]


def test_a_long_text_is_cut_off_between_characters(lexicon: Lexicon):
    forced = ("é" * MAX_BYTES).encode()
    found = spell(lexicon, Tokens(lexicon).continuing([], b"x" + forced))
    assert len(found) == MAX_BYTES - 1 and found.decode() == "x" + "é" * (MAX_BYTES // 2 - 1)


def test_remembers_a_bounded_number_of_cuts(lexicon: Lexicon, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jsg.engine.grammars.jump.MEMO_SIZE", 3)
    cutter = Tokens(lexicon)
    for number in range(10):
        cutter.continuing([], str(number).encode())
        assert len(cutter._memo) <= 3
    known = dict(cutter._memo)
    assert cutter.continuing([], b"9") in known.values() and cutter._memo == known
    cutter.appended([], b"9")  # is cut in another way, and so remembered apart
    assert cutter._memo != known


def test_appends_only_what_leaves_the_output_alone(lexicon: Lexicon):
    cutter = Tokens(lexicon)
    tokens = list(cutter.appended([], TEXT.encode()) or cutter.continuing([], TEXT.encode()))
    for index in range(len(tokens) + 1):
        appended = cutter.appended(tokens[:index], spell(lexicon, tokens[index:]))
        assert appended in ((), tuple(tokens[index:]))
    letters = [
        next(i for i in range(len(lexicon.vocabulary.tokens)) if lexicon.vocabulary.text_of(i) == bytes([b]))
        for b in b"na"
    ]
    assert cutter.appended(letters, b"me") == ()  # the usual cut begins with a longer token


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        (b"", b""),
        (b"abc", b"abc"),
        ("é".encode(), "é".encode()),
        ("aé".encode()[:-1], b"a"),
        ("日".encode()[:2], b""),
        ("日🙂".encode()[:-1], "日".encode()),
        ("日🙂".encode(), "日🙂".encode()),
    ],
)
def test_whole_characters(text: bytes, whole: bytes):
    assert _whole_characters(text) == whole


def test_a_directory_without_a_tokenizer_is_an_error_when_it_is_asked_for(tmp_path: pathlib.Path):
    loader = LexiconLoader(tmp_path, 96, frozenset({1}), KernelFolder(None))
    loader.wait()
    with pytest.raises(RequestError, match="needs the model's tokenizer"):
        loader.get()


def test_rows_of_the_model_without_a_token_and_odd_eos_ids_do_no_harm(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    """And the kernels are compiled, by a process that is not started here, into a directory that is nobody else's."""
    filled: list[pathlib.Path] = []
    monkeypatch.setattr(
        "jsg.engine.grammars.kernel_folder.fill_elsewhere", lambda directory, is_closing: filled.append(directory)
    )
    lettered.write_model(tmp_path / "model")
    loader = LexiconLoader(tmp_path / "model", 96, frozenset({1, 5000}), KernelFolder(tmp_path))
    vocabulary = loader.get().vocabulary
    assert vocabulary.size == 96 > len(vocabulary.tokens) and vocabulary.eos_ids == (1,)
    assert filled == [tmp_path / "numba"] and filled[0].stat().st_mode & 0o077 == 0


# What a model chose before.


def test_drafts_are_what_was_chosen_the_last_time(lexicon: Lexicon):
    cutter, forced = Tokens(lexicon), b'name": "'
    usual = cutter.continuing([], forced)
    assert cutter.draft([], forced) == usual
    letters = cutter._longest_match(b"n") + cutter._longest_match(b"ame")
    for before, rest, token in ((-1, forced, letters[0]), (letters[0], forced[1:], letters[1])):
        cutter.learn(before, rest, token)
    assert cutter.draft([], forced)[:2] == letters[:2] != usual[:2]
    assert spell(lexicon, cutter.draft([], forced)) == forced
    assert cutter.draft(letters[:1], forced) != cutter.draft([], forced)  # behind another token it is not known


def test_a_choice_that_varies_is_not_proposed(lexicon: Lexicon):
    cutter, forced = Tokens(lexicon), b"name"
    first, second = cutter._longest_match(b"n")[0], cutter._longest_match(b"na")[0]
    assert first != second
    for _ in range(20):
        cutter.learn(-1, forced, first)
    for proposed in (True, True, True, False, False, True):
        cutter.learn(-1, forced, second)
        assert bool(cutter.draft([], forced)) == proposed
    assert cutter.draft([], forced)[0] == second


def test_a_draft_may_end_behind_the_forced_text(lexicon: Lexicon):
    cutter = Tokens(lexicon)
    longer = cutter._longest_match(b"name")[0]
    cutter.learn(-1, b"na", longer)
    assert cutter.draft([], b"na") == (longer,)
