"""Answers with many log-probabilities: they are written and sent in parts, so that others have their turn."""

from typing import Any

import httpx
import msgspec
import pytest

from jsg import token_scores
from jsg.server.http import json_pieces
from jsg.server.shared import answers
from tests.server.running import events_of
from tests.server.threads import ServerMaker

PROMPT = "abcdefgh" * 64
PARAMS = {"max_tokens": 100, "logprobs": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 100, "logprobs": True, "top_logprobs": 2, "n": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "echo": True, **PARAMS},
    "/generate": {
        "text": PROMPT,
        "sampling_params": {"max_new_tokens": 100},
        **{"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
    },
    "/v1/chat/completions": CHAT,
}
MOST_BYTES = 2000
"""Of what becomes JSON in one call: a text of 612 characters, or a piece of a list."""


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small parts everywhere; gives how many bytes became JSON in each call."""
    monkeypatch.setattr(token_scores, "AT_ONCE", 30)
    monkeypatch.setattr(answers, "PIECE_SCORES", 12)
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", 1000)
    sizes, encode = list[int](), msgspec.json.encode

    def counted(*args: Any, **options: Any) -> bytes:
        made = encode(*args, **options)
        sizes.append(len(made))
        return made

    monkeypatch.setattr(msgspec.json, "encode", counted)
    return sizes


def asked(server: httpx.Client, **fields: Any) -> dict[str, httpx.Response]:
    got = {path: server.post(path, json=body | fields, timeout=60) for path, body in BODIES.items()}
    assert {response.status_code for response in got.values()} == {200}
    return got


def shown(response: httpx.Response) -> Any:
    """What does not differ from one answer to the same prompt to the next."""
    body = response.json()
    return body.get("choices") or {k: v for k, v in body["meta_info"].items() if k.endswith("logprobs")}


def test_in_parts_they_are_the_same(make_server: ServerMaker, in_parts: list[int], monkeypatch: pytest.MonkeyPatch):
    with make_server() as server:
        some = asked(server.http)
        streamed = asked(server.http, stream=True)
    assert max(in_parts) < MOST_BYTES
    assert all(len(response.content) > 10 * MOST_BYTES for response in some.values())
    choices = [event["choices"][0] for event in events_of(streamed["/v1/completions"])]
    [whole] = some["/v1/completions"].json()["choices"]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    for name, values in whole["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values
    last = events_of(streamed["/generate"])[-1]["meta_info"]
    assert {name: last[name] for name in shown(some["/generate"])} == shown(some["/generate"])
    for choice in some["/v1/chat/completions"].json()["choices"]:
        mine = [
            e["choices"][0]
            for e in events_of(streamed["/v1/chat/completions"])
            if e["choices"][0]["index"] == choice["index"]
        ]
        scores = [score for each in mine if each["logprobs"] for score in each["logprobs"]["content"]]
        assert scores == choice["logprobs"]["content"] and len(scores) == 100
    monkeypatch.undo()
    with make_server() as server:
        for path, response in asked(server.http).items():
            assert shown(response) == shown(some[path]), path
