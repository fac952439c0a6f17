"""Answers with many log-probabilities: they are written and sent in parts, so that others have their turn."""

import json

import httpx
import pytest

from jsg import token_scores
from jsg.server import text_threads
from jsg.server.http import failures
from jsg.server.shared import answers
from tests.server.threads import ServerMaker

PROMPT = "abcdefgh" * 64
ECHO = {"prompt": PROMPT, "max_tokens": 4, "echo": True, "logprobs": 2}
SCORED = {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, "logprob_start_len": 0}


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts everywhere."""
    monkeypatch.setattr(token_scores, "AT_ONCE", 30)
    monkeypatch.setattr(answers, "PIECE", 100)
    monkeypatch.setattr(failures, "PIECE_BYTES", 1000)


def asked(server: httpx.Client) -> list[dict]:
    got = [server.post("/v1/completions", json=ECHO), server.post("/generate", json=SCORED)]
    assert [response.status_code for response in got] == [200, 200], got[0].text
    return [got[0].json()["choices"][0], got[1].json()["meta_info"]["input_token_logprobs"]]


def test_in_parts_they_are_the_same(make_server: ServerMaker, in_parts: None, monkeypatch: pytest.MonkeyPatch):
    with make_server() as server:
        some = asked(server.http)
        ran: list[str] = []
        run = text_threads.TextThreads.run
        monkeypatch.setattr(
            text_threads.TextThreads,
            "run",
            lambda threads, work, size: ran.append(str(work)) or run(threads, work, size),
        )
        with server.http.stream("POST", "/v1/completions", json=ECHO | {"stream": True}) as response:
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
        assert any("pieces" in work for work in ran), "beside the loop"
    choices = [json.loads(line)["choices"][0] for line in lines[:-1]]
    assert "".join(choice["text"] for choice in choices) == some[0]["text"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    for name, values in some[0]["logprobs"].items():
        assert [value for choice in choices for value in choice["logprobs"][name]] == values
    monkeypatch.undo()
    with make_server() as server:
        assert asked(server.http) == some
