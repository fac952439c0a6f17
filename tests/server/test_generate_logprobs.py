"""`/generate` over real HTTP: the log-probabilities of prompts and answers."""

from typing import Any

import httpx
import pytest

from jsg.server.shared.answers import PIECE_SCORES
from jsg.speech.answers.answer import Answer
from tests.server.running import events_of
from tests.server.test_generate import error_of, generate

ALTERNATIVES = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [3, 4]}


def rounded(scores: list[list[Any]]) -> list[list[Any]]:
    """Scores to six digits: those of prompts are float32."""
    return [[logprob and round(logprob, 6), *rest] for logprob, *rest in scores]


def test_each_prompt_of_a_list_may_report_logprobs_of_its_own(http):
    answers = generate(
        http,
        input_ids=[[10, 11], [12, 13], [14, 15]],
        sampling_params={"max_new_tokens": 1},
        return_logprob=[True, False, True],
        logprob_start_len=[0, -1, 1],
        top_logprobs_num=2,
        token_ids_logprob=[[3], None, [4, 5]],
    ).json()
    first, second, third = (answer["meta_info"] for answer in answers)
    assert rounded(first["input_token_logprobs"]) == [[None, 10, None], [-0.011, 11, None]]
    assert rounded(third["input_token_logprobs"]) == [[-0.015, 15, None]]
    assert not any(name.endswith("logprobs") for name in second)
    assert [len(meta["output_top_logprobs"][0]) for meta in (first, third)] == [2, 2]
    assert first["output_token_ids_logprobs"] == [[[-3, 3, None]]]
    assert third["output_token_ids_logprobs"] == [[[-4, 4, None], [-5, 5, None]]]
    scored, plain = generate(http, input_ids=[[1], [2]], return_logprob=[True, False], top_logprobs_num=[1, 1]).json()
    assert len(scored["meta_info"]["output_top_logprobs"][0]) == 1
    assert not any(name.endswith("logprobs") for name in plain["meta_info"])


@pytest.mark.parametrize("off", [{}, {"return_logprob": None}, {"return_logprob": False}])
@pytest.mark.parametrize("is_list", [False, True])
def test_without_return_logprob_the_fields_beside_it_ask_for_nothing(http, off, is_list):
    beside = {"logprob_start_len": 0, "top_logprobs_num": 5, "token_ids_logprob": [3], "return_text_in_logprobs": True}
    if is_list:
        beside |= {"logprob_start_len": [99], "top_logprobs_num": [5], "token_ids_logprob": [[600]]}
    sampling = {"max_new_tokens": 2}
    answer = generate(http, text=["ab"] if is_list else "ab", sampling_params=sampling, **beside, **off).json()
    answer = answer[0] if is_list else answer
    assert answer["text"] == "ab"
    assert not any(name.endswith("logprobs") for name in answer["meta_info"])
    wrong = generate(http, text=["ab", "cd"], top_logprobs_num=[1, 2, 3])
    assert "top_logprobs_num must have one item for each of the 2 prompts" in error_of(wrong)


class TestNextToken:
    """`max_new_tokens` 0 with log-probabilities of alternatives: those of the token that would come next."""

    def answers(self, http: httpx.Client, **fields) -> list[dict]:
        body = {"input_ids": [[5, 6], [7, 8]], "sampling_params": {"max_new_tokens": 0}} | ALTERNATIVES | fields
        response = generate(http, **body)
        assert response.status_code == 200, response.text
        if not body.get("stream"):
            return response.json()
        events = list(events_of(response))
        return [[event for event in events if event["index"] == index][-1] for index in (0, 1)]

    @pytest.mark.parametrize("stream", [False, True])
    def test_they_are_reported_and_no_token_is(self, http, stream):
        for first, answer in zip((5, 7), self.answers(http, stream=stream, logprob_start_len=0), strict=True):
            meta = answer["meta_info"]
            assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
            assert meta["finish_reason"] == {"type": "length", "length": 0}
            assert meta["output_token_logprobs"] == []
            assert meta["output_top_logprobs"] == [[[0, first, None], [-1, first + 1, None]]]
            assert meta["output_token_ids_logprobs"] == [[[-3, 3, None], [-4, 4, None]]]
            assert [entry[1] for entry in meta["input_token_logprobs"]] == [first, first + 1]

    def test_a_token_that_would_end_the_answer_is_not_named(self, http):
        for answer in self.answers(http, sampling_params={"max_new_tokens": 0, "stop_token_ids": [5], "stop": ["a"]}):
            assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}

    def test_a_prompt_that_fills_the_context_has_none(self, http):
        full = [7] * 1024
        for answer in self.answers(http, input_ids=[full, full]):
            assert answer["meta_info"]["output_top_logprobs"] == []

    def test_in_parts_nothing_is_kept(self, http):
        fields = {"prompt": ["ab"], "sampling_params": {"max_new_tokens": 0}, **ALTERNATIVES}
        meta = generate(http, **fields).json()["meta_info"]
        assert (meta["kept_ids"], meta["tail"]) == ([], "") and len(meta["output_top_logprobs"]) == 1


def test_logprobs(http):
    answer = generate(
        http,
        input_ids=[10, 11, 12],
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[3],
        return_text_in_logprobs=True,
    ).json()
    meta = answer["meta_info"]
    assert rounded(meta["input_token_logprobs"]) == [[None, 10, "+"], [-0.011, 11, ","], [-0.012, 12, "-"]]
    assert meta["output_token_logprobs"] == [[-0.01, 10, "+"], [-0.011, 11, ","]]
    assert meta["output_top_logprobs"] == [[[0, 10, "+"], [-1, 11, ","]], [[0, 11, ","], [-1, 12, "-"]]]
    assert meta["output_token_ids_logprobs"] == [[[-3, 3, "$"]]] * 2 and meta["input_top_logprobs"][0] is None
    assert len(meta["input_top_logprobs"]) == 3
    plain = generate(http, input_ids=[10], sampling_params={"max_new_tokens": 1}, return_logprob=True).json()
    assert plain["meta_info"]["output_token_logprobs"] == [[-0.01, 10, None]]
    assert plain["meta_info"]["input_token_logprobs"] == []


def test_a_stream_shows_the_logprobs_of_the_prompt_first_and_last(http):
    scored = [[None, 10, None], [-0.011, 11, None]]
    body = {"input_ids": [10, 11], "return_logprob": True, "logprob_start_len": 0, "stream": True}
    with http.stream("POST", "/generate", json=body | {"sampling_params": {"max_new_tokens": 50, "n": 2}}) as r:
        events = events_of(r)
    for index in range(2):
        metas = [event["meta_info"] for event in events if event["index"] == index]
        assert metas[0]["input_token_logprobs"] == metas[-1]["input_token_logprobs"]
        assert rounded(metas[0]["input_token_logprobs"]) == scored
        assert not any("input_token_logprobs" in meta for meta in metas[1:-1])
        assert [len(meta["output_token_logprobs"]) for meta in metas] == [meta["completion_tokens"] for meta in metas]


def test_a_stream_does_not_repeat_many_logprobs_for_every_token(http):
    """A stream of as many tokens without them has hundreds of events."""
    body = {"text": "ab", "stream": True, "return_logprob": True, "top_logprobs_num": 128}
    events = events_of(generate(http, **body, sampling_params={"max_new_tokens": 300}))
    scored = [len(event["meta_info"]["output_token_logprobs"]) for event in events]
    assert scored == sorted(scored) and scored[-1] == len(events[-1]["output_ids"]) == 300
    assert sum(scored) < 20_000  # one event for each token would be 45 000


def test_a_stream_makes_each_logprob_once(http, monkeypatch: pytest.MonkeyPatch):
    """Each event repeats them, and making them again would keep the event loop from others for seconds."""
    made: list[int] = []
    real = Answer.shown_logprobs

    def counted(answer: Answer, *args: Any) -> dict[str, list[Any]]:
        shown = real(answer, *args)
        made.append(len(shown["output_token_logprobs"]))
        return shown

    monkeypatch.setattr(Answer, "shown_logprobs", counted)
    body = {"text": "ab", "return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    params = {"max_new_tokens": 100}
    *_, last = events_of(generate(http, **body, stream=True, sampling_params=params))
    assert len(made) > 10 and sum(made) == 100
    whole = generate(http, **body, sampling_params=params).json()
    for name in ("output_token_logprobs", "output_top_logprobs"):
        assert last["meta_info"][name] == whole["meta_info"][name]


@pytest.mark.parametrize("stream", [False, True])
def test_the_event_loop_runs_between_pieces_of_many_logprobs(http, monkeypatch: pytest.MonkeyPatch, stream):
    """One answer has half a million of them; in one piece they kept the loop from every other client for a second."""
    most = [0]
    real = Answer._shown_logprobs

    def counted(answer: Answer, side: str, scored: Any, *args: Any) -> dict[str, list[Any]]:
        most[0] = max(most[0], sum(1 + len(token.top) for token in scored))
        return real(answer, side, scored, *args)

    monkeypatch.setattr(Answer, "_shown_logprobs", counted)
    body = {"text": "ab" * 100, "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 20}
    answer = generate(http, **body, stream=stream, sampling_params={"max_new_tokens": 100})
    meta = (events_of(answer)[-1] if stream else answer.json())["meta_info"]
    for side, num in ("input", 200), ("output", 100):
        assert [len(meta[f"{side}_{name}"]) for name in ("token_logprobs", "top_logprobs")] == [num, num]
    assert most[0] <= PIECE_SCORES


def test_logprobs_end_with_the_token_that_completed_a_stop_string(http):
    params = {"max_new_tokens": 100, "stop": "cab"}
    meta = generate(http, text="abc", sampling_params=params, return_logprob=True).json()["meta_info"]
    assert len(meta["output_token_logprobs"]) == meta["completion_tokens"] == 5
