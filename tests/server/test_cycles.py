"""What a request leaves is freed when it ends, so that a full collection, which stops the loop, finds little."""

import collections
import gc
from collections.abc import Iterator

import pytest

import jsg as sgl
from jsg.server.native import lang_backend
from tests.server.posted_programs import graph_of
from tests.server.scripted import ScriptedServer

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@sgl.function
def branches(s):
    s += "words and words"
    forks = s.fork(8)
    for number in range(8):
        forks[number] += f" {number}" + sgl.gen("said", max_tokens=4)
    forks.join()


def posts() -> Iterator[tuple[str, dict]]:
    for stream in ({}, {"stream": True}):
        yield (
            "/v1/chat/completions",
            {"messages": HI, "max_tokens": 4, "n": 4, "logprobs": True, "top_logprobs": 3} | stream,
        )
        yield "/v1/completions", {"prompt": ["a b"] * 4, "max_tokens": 4} | stream
        yield "/v1/responses", {"input": "hi", "max_output_tokens": 8} | stream
        yield "/v1/programs", {"graph": graph_of(branches)} | stream
    yield "/v1/chat/completions", {"messages": HI, "max_tokens": 4, "response_format": FORMAT}
    yield "/v1/chat/completions", {"messages": HI, "max_tokens": "many"}
    yield "/generate", {"text": ["a b"] * 4, "sampling_params": {"max_new_tokens": 4, "stop_regex": ["x+y"]}}
    yield "/generate", {"text": ["a b"] * 4, "sampling_params": {"max_new_tokens": -4}}
    yield "/generate", {"text": ["a b " * 100_000] * 2, "sampling_params": {"max_new_tokens": 4}}
    yield "/select", {"prompt": "a b", "choices": [f"x {number}" for number in range(9)]}
    yield "/v1/score", {"query": "a b", "items": ["c"] * 9, "label_token_ids": [5]}
    yield "/v1/completions/render", {"prompt": ["a b"] * 4}
    yield "/tokenize", {"prompt": ["a b"] * 9}


def test_no_request_leaves_cycles_of_ours(scripted_server: ScriptedServer, monkeypatch: pytest.MonkeyPatch):
    """In the programs the budget of tokens is spent for most branches. The first post of each kind may fill caches."""
    monkeypatch.setattr(lang_backend, "MAX_PROMPT_TOKENS", 60)
    for path, body in posts():
        scripted_server.http.post(path, json=body)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        found = [scripted_server.http.post(path, json=body).status_code for path, body in posts()]
        assert collections.Counter(found) == {200: 14, 400: 3}
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = collections.Counter(
            type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith("jsg")
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
    assert not left
