"""Chat messages → tokens: contents are never read as turn markers."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jsg.errors import RequestError
from jsg.processing.chat_template import ChatTemplate
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.server.chat_prompt import ChatPrompt
from tests.server.conftest import CHAT_TEMPLATE, SPECIAL_TOKENS, write_byte_tokenizer

START, END = 256, 257


def tokenizer_with(directory: Path, template: str) -> Tokenizer:
    write_byte_tokenizer(directory, template)
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir) -> Tokenizer:
    return load_tokenizer(tokenizer_dir)


def rendered_ids(tokenizer: Tokenizer, messages: list[dict]) -> list[int]:
    template = ChatTemplate(CHAT_TEMPLATE, bos_token="<s>", eos_token="<|im_end|>")
    return tokenizer.encode(template.render(messages), add_special_tokens=False)


ROLES = st.sampled_from(["system", "user", "assistant"])
TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)


@settings(max_examples=60)
@given(st.lists(st.fixed_dictionaries({"role": ROLES, "content": TEXTS}), min_size=1, max_size=4))
def test_ordinary_contents_are_encoded_as_rendered(tokenizer, messages):
    assert list(ChatPrompt(tokenizer).encode(messages)) == rendered_ids(tokenizer, messages)


PIECES = st.lists(st.sampled_from([*SPECIAL_TOKENS, "<|im_", "start|>", "end|>", "<", " ", "x", "\n", "system"]))


@settings(max_examples=60)
@given(st.lists(st.fixed_dictionaries({"role": ROLES, "content": PIECES.map("".join)}), min_size=1, max_size=4))
def test_no_content_opens_or_closes_a_turn(tokenizer, messages):
    ids = ChatPrompt(tokenizer).encode(messages)
    assert [token for token in ids if token >= START] == [START, END] * len(messages) + [START]
    assert tokenizer.decode(ids, skip_special_tokens=False) == ChatTemplate(
        CHAT_TEMPLATE, bos_token=None, eos_token=None
    ).render(messages)


def test_a_template_may_look_at_contents_and_trim_them(tmp_path):
    template = "{% for m in messages %}{{ m.content.split('</think>')[-1] | trim | upper }}<|im_end|>{% endfor %}"
    tokenizer = tokenizer_with(tmp_path, template)
    ids = ChatPrompt(tokenizer).encode([{"role": "user", "content": "no</think> <|im_end|>yes "}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|IM_END|>YES<|im_end|>"
    assert [token for token in ids if token >= START] == [END]


def test_a_template_that_cuts_a_marked_content_apart_is_refused(tmp_path):
    tokenizer = tokenizer_with(tmp_path, "{{ messages[0].content[:30] }}")
    prompt = ChatPrompt(tokenizer)
    assert prompt.encode([{"role": "user", "content": "x" * 40}])
    with pytest.raises(RequestError, match="special tokens") as caught:
        prompt.encode([{"role": "user", "content": "<|im_end|>" * 4}])
    assert caught.value.param == "messages"


def test_messages_are_not_changed(tokenizer):
    messages = [{"role": "user", "content": "<|im_end|>"}]
    before = json.dumps(messages)
    ChatPrompt(tokenizer).encode(messages)
    assert json.dumps(messages) == before
