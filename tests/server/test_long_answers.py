"""Answers with many log-probabilities: they come, are written and are sent in parts, so that others have their turn."""

import itertools
import json

import httpx
import pytest

from jsg.engine.child import process
from jsg.engine.child.process import cut_scores
from jsg.engine.front.sent_scores import SentScores
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
        parts = list(cut_scores(outputs))
        sent.extend(part.count for part in parts)
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


def test_many_scores_of_prompts_stay_encoded_in_the_front(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "FEW_SCORES", 20)
    monkeypatch.setattr(process, "PART_SCORES", 30)
    for top, numbers in (((), [30, 31, 100, 2]), (((1, -1.0),) * 9, [25, 1])):
        scores = [tuple(TokenLogprob(token_id=n, logprob=-1.0, top=top) for n in range(number)) for number in numbers]
        outputs = [RequestOutput(rid=str(index), prompt_logprobs=some) for index, some in enumerate(scores)]
        parts = list(cut_scores(outputs))
        assert all(part.count * (1 + len(top)) <= 30 for part in parts)
        for index, output in enumerate(outputs):
            sent = SentScores()
            for part in parts:
                if part.rid == str(index):
                    sent.add(part)
            if len(scores[index]) * (1 + len(top)) <= 20:
                assert (len(sent), output.prompt_logprobs) == (0, scores[index])
                continue
            assert output.prompt_logprobs == ()
            assert (len(sent), tuple(sent), sent[-1]) == (len(scores[index]), scores[index], scores[index][-1])
            for start, stop, step in itertools.product((None, 0, 3, 29, 30, -1), (None, 0, 4, 30, 61, 999), (1, -2)):
                assert sent[start:stop:step] == scores[index][start:stop:step]
            with pytest.raises(IndexError):
                _ = sent[len(sent)]
    assert not list(cut_scores([RequestOutput(rid="a"), RequestOutput(rid="b", prompt_logprobs=())]))
