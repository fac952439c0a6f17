import functools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.tokenizer import Tokenizer

PROPERTY = settings(deadline=None, derandomize=True, max_examples=50)


def _cut(ids: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    """The ids in pushes: at each cut length one push, the rest in a last one."""
    for length in cuts:
        yield ids[:length]
        ids = ids[length:]
    yield ids


@functools.cache
def _bytes_of(tokenizer: Tokenizer) -> list[int]:
    """The tokens that are one byte outside ASCII: what broken characters are made of."""
    return [i for i in range(tokenizer.vocab_size) if len(b := tokenizer.token_bytes(i)) == 1 and b[0] >= 0x80]


@PROPERTY
@given(data=st.data(), cuts=st.lists(st.integers(0, 4), max_size=10), skip=st.booleans())
def test_pushes_equal_decoding_the_whole(
    tokenizer: Tokenizer, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    any_id = st.integers(-1, tokenizer.vocab_size + 1)
    one_of = st.one_of(any_id, st.sampled_from(_bytes_of(tokenizer)), st.sampled_from(sorted(tokenizer.special_ids)))
    ids = data.draw(st.lists(one_of, max_size=16))
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(part) for part in _cut(ids, cuts))
    assert text + detokenizer.finish() == tokenizer.decode(ids, skip_special_tokens=skip)


@PROPERTY
@given(text=st.text(max_size=30))
def test_never_emits_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "").replace("▁", "")
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    shown = ""
    for token_id in ids:
        shown += detokenizer.push([token_id])
        assert text.startswith(shown)
    assert shown == text
    assert detokenizer.finish() == ""


def test_a_character_comes_with_its_last_byte(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["llama"]
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "🙈".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "🙈"]
    detokenizer.push(ids[:3])
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("prompt", ["Hi", "Hi 😀"])
def test_what_follows_a_prompt_continues_it(tokenizer: Tokenizer, prompt: str) -> None:
    whole = tokenizer.encode(prompt + " there", add_special_tokens=False)
    head = tokenizer.encode(prompt, add_special_tokens=False)
    assert whole[: len(head)] == head
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, prompt_tail_ids=head)
    assert detokenizer.push(whole[len(head) :]) == " there"


def test_a_special_token_alone_is_no_text_to_continue(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["llama"]
    assert tokenizer.bos_token_id is not None
    ids = tokenizer.encode("Hi", add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, prompt_tail_ids=[tokenizer.bos_token_id])
    assert detokenizer.push(ids) == "Hi"


def test_completes_a_character_that_the_prompt_began(all_tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = all_tokenizers["byte_level"]
    by_byte = {tokenizer.token_bytes(i): i for i in _bytes_of(tokenizer)}
    ids = [by_byte[bytes([byte])] for byte in "ꙮ".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=True, prompt_tail_ids=ids[:2])
    assert detokenizer.push(ids[2:]) == "ꙮ"
