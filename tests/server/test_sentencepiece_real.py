"""A checkpoint whose tokenizer is a `tokenizer.model` alone, served as it was published: `jsg serve`, over a socket."""

import re
from collections.abc import Iterator

import httpx
import pytest

from tests.processing.sentencepieces import PUBLISHED, write
from tests.server.real_model import write_real_model
from tests.server.running import data_of, serving

pytestmark = pytest.mark.slow

TEXT = "Hello 😀 there"


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory, compile_cache_dir: str) -> Iterator[httpx.Client]:
    """The model of the other servers of these tests, so that nothing new compiles, with Vicuna's files."""
    directory = write_real_model(tmp_path_factory.mktemp("sentencepiece") / "model")
    (directory / "tokenizer.json").unlink()
    write(directory, PUBLISHED["vicuna_1_5"])
    with serving(directory, compile_cache_dir) as server:
        yield server.http


def post(http: httpx.Client, path: str, **body: object) -> dict:
    response = http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_and_text_are_two_spellings(http: httpx.Client):
    tokens = post(http, "/tokenize", prompt=TEXT)["tokens"]
    assert tokens[0] == 1, "BOS comes in front, as tokenizer_config.json says"
    assert {3 + byte for byte in "😀".encode()} <= set(tokens), "a character that training never saw is its bytes"
    assert post(http, "/detokenize", tokens=tokens[1:])["text"] == TEXT


def test_a_prompt_is_the_same_as_text_and_as_tokens(http: httpx.Client):
    tokens = post(http, "/tokenize", prompt=TEXT)["tokens"]
    greedy = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    by_text = post(http, "/generate", text=TEXT, sampling_params=greedy)
    by_tokens = post(http, "/generate", input_ids=tokens, sampling_params=greedy)
    assert by_text["meta_info"]["prompt_tokens"] == len(tokens) and by_text["text"] == by_tokens["text"]
    assert by_text["output_ids"] == by_tokens["output_ids"] and len(by_text["output_ids"]) == 12


def test_an_answer_goes_on_where_the_prompt_ends(http: httpx.Client):
    """What follows keeps its leading space, in a stream as in one piece."""
    body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0, "regex": " dog\\. [a-z]{3} 😀"}
    whole = post(http, "/v1/completions", **body | {"max_tokens": 20})["choices"][0]
    assert re.fullmatch(r" dog\. [a-z]{3} 😀", whole["text"])
    assert whole["finish_reason"] == "stop"
    with http.stream("POST", "/v1/completions", json=body | {"max_tokens": 20, "stream": True}) as response:
        parts = [event["choices"][0]["text"] for event in data_of(response.iter_lines())]
    assert "".join(parts) == whole["text"]
    assert all("\ufffd" not in part for part in parts)
    echoed = post(http, "/v1/completions", **body | {"max_tokens": 20, "echo": True})["choices"][0]["text"]
    assert echoed == "Hello" + whole["text"]


def test_a_chat_says_what_is_missing(http: httpx.Client):
    messages = [{"role": "user", "content": "Hi"}]
    response = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2})
    assert response.status_code == 400 and "chat_template.jinja" in response.json()["error"]["message"]
