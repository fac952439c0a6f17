"""`/v1/completions` over real HTTP, with an engine that repeats the prompt."""

import contextlib
import math

import pytest

from jsg.server.openai.common import shown_logprob
from jsg.server.openai.completions import CompletionBody
from tests.engine.fake_core import FAILING_TOKEN
from tests.server.openai_calls import (
    ENDED,
    complete,
    error_of,
    stream,
    tokens_of,
)


class TestCompletions:
    def test_one_prompt(self, http):
        body = complete(http, "xyz", max_tokens=4).json()
        assert body["object"] == "text_completion"
        assert body["choices"] == [{"index": 0, "text": "xyzx", "logprobs": None} | ENDED]
        assert body["usage"]["total_tokens"] == 7
        assert complete(http, "xyz").json()["usage"]["completion_tokens"] == 16

    @pytest.mark.parametrize("prompt", [["ab", "cd"], [[64, 65], [66, 67]]])
    def test_several_prompts(self, http, prompt):
        body = complete(http, prompt, max_tokens=2, n=2).json()
        assert [choice["text"] for choice in body["choices"]] == ["ab", "ab", "cd", "cd"]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert body["usage"]["prompt_tokens"] == 4 and body["usage"]["completion_tokens"] == 8

    def test_token_ids(self, http):
        assert complete(http, [64, 65], max_tokens=3).json()["choices"][0]["text"] == "aba"

    def test_echo_and_logprobs(self, http):
        choice = complete(http, "aé", max_tokens=2, echo=True, logprobs=2).json()["choices"][0]
        assert choice["text"] == "aéa\ufffd"
        shown = choice["logprobs"]
        assert shown["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"]
        assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
        assert shown["top_logprobs"][3] == {"a": 0, "b": -1} and shown["text_offset"] == [0, 1, 1, 2, 3]

    def test_echo_without_new_tokens_scores_a_text(self, http):
        choice = complete(http, "abc", max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
        assert choice["text"] == "abc"
        assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx([-0.065, -0.066])
        assert choice["logprobs"]["token_logprobs"][0] is None
        assert choice["logprobs"]["top_logprobs"][1] == pytest.approx({"b": -0.065})

    def test_a_stream_adds_up_to_the_whole(self, http):
        whole = complete(http, "abc", max_tokens=5, echo=True, logprobs=1).json()["choices"][0]
        options = {"echo": True, "logprobs": 1, "stream_options": {"include_usage": True}}
        *events, last = stream(http, "/v1/completions", prompt="abc", max_tokens=5, **options)
        assert last["usage"]["total_tokens"] == 8
        choices = [event["choices"][0] for event in events]
        assert "".join(choice["text"] for choice in choices) == whole["text"] == "abcabcab"
        for key, values in whole["logprobs"].items():
            assert [value for choice in choices for value in choice["logprobs"][key]] == values
        reasons = [choice["finish_reason"] for choice in choices]
        assert reasons == [None] * (len(choices) - 1) + ["length"]

    def test_accepted_fields_change_nothing(self, http):
        accepted = {
            "best_of": 1,
            "metadata": {"task": "a"},
            "add_special_tokens": True,
            "spaces_between_special_tokens": True,
            "use_beam_search": False,
            "length_penalty": 1.0,
            "return_hidden_states": False,
            "return_token_ids": False,
        }
        assert accepted.keys() == CompletionBody.ACCEPTED.keys()
        answers = [complete(http, "abc", **fields).json() for fields in ({}, accepted)]
        assert answers[0]["choices"] == answers[1]["choices"]

    def test_the_best_n_of_n_answers_are_all(self, http):
        answers = [complete(http, "abc", n=2, **fields).json() for fields in ({}, {"best_of": 2})]
        assert answers[0]["choices"] == answers[1]["choices"]

    def test_without_a_limit_there_are_sixteen_tokens_or_what_there_is_room_for(self, http):
        counts = [complete(http, "x" * size).json()["usage"]["completion_tokens"] for size in (10, 1020)]
        assert counts == [16, 4]
        assert complete(http, ["x" * 10, "x" * 1020]).json()["usage"]["completion_tokens"] == 20

    def test_names_of_several_prompts(self, server):
        body = {"prompt": ["ab", "cd"], "max_tokens": 900, "rid": "mine"}
        with contextlib.closing(server.send("/v1/completions", body)) as held:
            server.wait_for_stats(num_running=2)
            assert server.http.post("/abort_request", json={"rid": "mine_1"}).json()["aborted"] == 1
            assert held.getresponse().status == 499

    def test_an_echo_shows_a_character_that_the_answer_completes(self, http):
        ids = [*tokens_of(http, "aé")[:2]]
        choice = complete(http, ids, max_tokens=0, echo=True, logprobs=0).json()["choices"][0]
        assert choice["text"] == "a\ufffd"
        euro = tokens_of(http, "€")
        whole = complete(http, [*euro, *euro[:1]], max_tokens=4, echo=True, logprobs=0).json()["choices"][0]
        assert whole["text"] == "€\ufffd€\ufffd", "the bytes of the answer are those of the prompt from its beginning"
        parts = complete(http, [*euro[1:], euro[0]], max_tokens=2, echo=True, logprobs=0).json()["choices"][0]
        assert parts["text"] == "\ufffd\ufffd€" and parts["logprobs"]["text_offset"] == [0, 1, 2, 2, 2]
        streamed = stream(http, "/v1/completions", prompt=[*euro[1:], euro[0]], max_tokens=2, echo=True)
        assert "".join(event["choices"][0]["text"] for event in streamed) == "\ufffd\ufffd€"

    def test_an_echo_without_logprobs_scores_nothing(self, http):
        choice = complete(http, "abc", max_tokens=1, echo=True).json()["choices"][0]
        assert (choice["text"], choice["logprobs"]) == ("abca", None)

    def test_an_echo_may_show_special_tokens(self, http):
        for skips, text in ((True, "aa"), (False, "<s>a<s>a")):
            body = {"max_tokens": 2, "echo": True, "skip_special_tokens": skips}
            assert complete(http, [258, 64], **body).json()["choices"][0]["text"] == text

    def test_no_alternative_is_minus_infinity(self):
        assert shown_logprob(-math.inf) == -9999 and shown_logprob(-1.5) == -1.5

    def test_a_failing_row(self, http):
        response = complete(http, [FAILING_TOKEN])
        assert response.status_code == 500
        assert error_of(response)["type"] == "server_error"
