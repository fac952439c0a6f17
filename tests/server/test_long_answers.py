"""Answers with many log-probabilities: they come, are written and are sent in parts, so that others have their turn."""

import json

import httpx
import pytest

from jsg.engine.child import process
from jsg.engine.child.process import cut_scores
from jsg.server import text_threads
from jsg.server.http import failures
from jsg.server.shared import answers
from jsg.types import RequestOutput, TokenLogprob
from tests.server.threads import ServerMaker

PROMPT = "abcdefgh" * 64
ECHO = {"prompt": PROMPT, "max_tokens": 4, "echo": True, "logprobs": 2}
SCORED = {"text": PROMPT, "sampling_params": {"max_new_tokens": 4}, "return_logprob": True, "logprob_start_len": 0}


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small parts everywhere, and how many scores each message of the engine had."""
    sent: list[int] = []

    def noted(outputs: list[RequestOutput]) -> list[process.PromptScores]:
        parts = cut_scores(outputs)
        sent.extend(len(part.logprobs) for part in parts)
        return parts

    monkeypatch.setattr(process, "cut_scores", noted)
    monkeypatch.setattr(process, "PART_SCORES", 300)
    monkeypatch.setattr(answers, "PIECE", 100)
    monkeypatch.setattr(failures, "PIECE_BYTES", 1000)
    return sent


def asked(server: httpx.Client) -> list[dict]:
    got = [server.post("/v1/completions", json=ECHO), server.post("/generate", json=SCORED)]
    assert [response.status_code for response in got] == [200, 200], got[0].text
    return [got[0].json()["choices"][0], got[1].json()["meta_info"]["input_token_logprobs"]]


def test_in_parts_they_are_the_same(make_server: ServerMaker, in_parts: list[int], monkeypatch: pytest.MonkeyPatch):
    with make_server() as server:
        some = asked(server.http)
        assert len(in_parts) >= 2 * len(PROMPT) // 300
        assert max(in_parts) <= 300
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


def test_scores_are_cut_where_they_are_more_than_a_part_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "PART_SCORES", 100)
    for top, numbers in (((), [30, 30, 30, 30, 2]), (((1, -1.0),) * 9, [25, 1])):
        scores = [tuple(TokenLogprob(token_id=n, logprob=-1.0, top=top) for n in range(number)) for number in numbers]
        outputs = [RequestOutput(rid=str(index), prompt_logprobs=some) for index, some in enumerate(scores)]
        parts = cut_scores(outputs)
        assert all(len(part.logprobs) * (1 + len(top)) <= 100 for part in parts)
        kept = [len(output.prompt_logprobs or ()) for output in outputs]
        assert sum(kept) * (1 + len(top)) <= 100 + len(outputs) * (1 + len(top)) and min(kept) >= 1
        for index, output in enumerate(outputs):
            before = [score for part in parts if part.rid == str(index) for score in part.logprobs]
            assert (*before, *(output.prompt_logprobs or ())) == scores[index]
    assert cut_scores([RequestOutput(rid="a"), RequestOutput(rid="b", prompt_logprobs=())]) == []
