"""`/generate` over real HTTP, with an engine that repeats the prompt."""

import asyncio
import json
import time

import httpx
import pytest

from tests.engine.fake_core import FAILING_TOKEN, QUEUE_S
from tests.server.running import RunningServer, events_of


def generate(http: httpx.Client, **body) -> httpx.Response:
    return http.post("/generate", json=body)


def error_of(response: httpx.Response) -> str:
    body = response.json()
    assert set(body) - {"error", "object", "code"} == set(body["error"])
    assert {"message"} <= set(body["error"]) <= {"message", "type", "param"}
    assert (body["object"], body["code"]) == ("error", response.status_code)  # the flat form, as SGLang has it
    assert body.items() >= body["error"].items()
    return body["error"]["message"]


def test_one_text(http):
    answer = generate(http, text="hello ", sampling_params={"max_new_tokens": 8}, rid="my-rid").json()
    assert answer["text"] == "hello he"
    assert bytes_of(answer["output_ids"]) == answer["text"]
    meta = answer["meta_info"]
    assert meta["id"] == "my-rid" and meta["finish_reason"] == {"type": "length", "length": 8}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (6, 8, 0)
    assert 0 < meta["time_to_first_token"] <= meta["e2e_latency"] < 5 and meta["queue_time"] == 0.25
    assert "output_token_logprobs" not in meta


def bytes_of(ids: list[int]) -> str:
    """Text of ids of letters and spaces: the byte tokenizer's alphabet is sorted, "!" is token 0."""
    return "".join(" " if token == 220 else chr(token + 33) for token in ids)


def test_no_new_tokens_fills_the_cache_only(http):
    answer = generate(http, text="prefill", sampling_params={"max_new_tokens": 0}).json()
    assert (answer["text"], answer["output_ids"], answer["meta_info"]["completion_tokens"]) == ("", [], 0)


def test_a_list_of_prompts_gives_a_list_in_order(http):
    params = [{"max_new_tokens": 2}, {"max_new_tokens": 3}]
    answers = generate(http, text=["ab", "xyz"], sampling_params=params, rid=["r0", "r1"]).json()
    assert [answer["text"] for answer in answers] == ["ab", "xyz"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r0", "r1"]
    answers = generate(http, input_ids=[[7], [8, 9]], sampling_params={"max_new_tokens": 2}, rid="r").json()
    assert [answer["output_ids"] for answer in answers] == [[7, 7], [8, 9]]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1"]
    assert isinstance(generate(http, text=["only"], sampling_params={"max_new_tokens": 1}).json(), list)


def test_n_answers_follow_their_prompt(http):
    answers = generate(http, text=["ab", "cd"], sampling_params={"max_new_tokens": 2, "n": 2}, rid="r").json()
    assert [answer["text"] for answer in answers] == ["ab", "ab", "cd", "cd"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0_0", "r_0_1", "r_1_0", "r_1_1"]


def test_what_clients_send_but_do_not_use_is_as_good_as_absent(http):
    off = {
        **dict.fromkeys(("image_data", "audio_data", "lora_path", "session_params", "rid", "stream", "priority")),
        **dict.fromkeys(("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob", "cache_salt")),
        **{"return_hidden_states": False, "modalities": [], "custom_logit_processor": "", "bootstrap_port": None},
        "log_metrics": True,
    }
    sampling = {"max_new_tokens": 2, "json_schema": None, "stop": None, "spaces_between_special_tokens": True}
    assert generate(http, text="ab", sampling_params=sampling, **off).json()["text"] == "ab"


def test_without_a_number_new_tokens_shrink_to_the_room_that_is_left(http):
    for num_prompt, num_new in ((100, 128), (1000, 24), (1023, 1)):
        meta = generate(http, input_ids=[7] * num_prompt).json()["meta_info"]
        assert (meta["completion_tokens"], meta["finish_reason"]["type"]) == (num_new, "length")
    assert "1024 + 1" in error_of(generate(http, input_ids=[7] * 1024))


def test_the_model_may_be_named(http):
    """Routers in front of several servers add its name, or a word that stands for none."""
    sampling = {"max_new_tokens": 1}
    for name in ("fake", "unknown", None):
        assert generate(http, text="ab", model=name, sampling_params=sampling).json()["text"] == "a"
    other = generate(http, text="ab", model="another")
    assert other.status_code == 404
    assert "model must be 'fake'" in error_of(other)


@pytest.mark.parametrize("stream", [False, True])
def test_ids_outside_the_vocabulary_never_match(http, stream):
    sampling = {"max_new_tokens": 4, "stop_token_ids": [151643, 6], "logit_bias": {"151645": -100, "5": 1}}
    answer = generate(http, input_ids=[5, 7], sampling_params=sampling, stream=stream)
    last = list(events_of(answer))[-1] if stream else answer.json()
    assert last["output_ids"] == [5, 7, 5, 7]
    named = [f"an id in {name} that is outside the vocabulary" for name in ("stop_token_ids", "logit_bias")]
    warnings = [f"{name} has no effect: no token has it; leave it out" for name in named]
    assert answer.headers["x-jsg-warnings"] == "; ".join(warnings)
    assert last["meta_info"]["warnings"] == warnings
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "stream": stream}
    for others, warned in (({"stop_token_ids": [151643]}, warnings[:1]), ({"stop_token_ids": [6]}, [])):
        response = http.post("/v1/chat/completions", json=chat | others)
        assert (response.status_code, response.headers.get("x-jsg-warnings", "")) == (200, "; ".join(warned))


class TestCache:
    """Which requests share cached prefixes, and why a prefix was not found."""

    def cached(self, http: httpx.Client, ids: list[int], **fields: object) -> int:
        sampling = {"max_new_tokens": 1}
        return generate(http, input_ids=ids, sampling_params=sampling, **fields).json()["meta_info"]["cached_tokens"]

    @pytest.mark.parametrize("name", ["cache_salt", "extra_key"])
    def test_one_salt_shares_and_two_do_not(self, http, name):
        ids = [200 + len(name), *range(20, 30)]
        assert self.cached(http, ids) == 0 and self.cached(http, ids) == 10
        assert self.cached(http, ids, **{name: "red"}) == 0 and self.cached(http, ids, **{name: "red"}) == 10
        assert self.cached(http, ids, **{name: "blue"}) == 0
        assert self.cached(http, ids, **{name: ""}) == 0, "an empty salt is a salt"

    def test_a_salt_is_no_extra_key(self, http):
        ids = [*range(40, 50)]
        assert self.cached(http, ids, cache_salt="a") == 0 and self.cached(http, ids, extra_key="a") == 0
        assert self.cached(http, ids, cache_salt="a", extra_key="a") == 0
        assert self.cached(http, ids, cache_salt="a", extra_key="a") == 9

    def test_each_prompt_of_a_list_may_have_its_own(self, http):
        ids, sampling = [*range(60, 70)], {"max_new_tokens": 1}
        for cached in (0, 9):
            answers = generate(http, input_ids=[ids, ids], cache_salt=["x", None], sampling_params=sampling).json()
            assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [cached, cached]
        assert self.cached(http, ids, cache_salt="y") == 0
        assert "one item for each" in error_of(generate(http, input_ids=[ids, ids], cache_salt=["x"]))

    @pytest.mark.parametrize("salt", ["\ud800", "x" * 2000, 5, ["a", "b"]])
    def test_a_salt_must_be_a_short_text(self, http, salt):
        content = json.dumps({"text": "a", "cache_salt": salt})
        response = http.post("/generate", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert "cache_salt" in error_of(response)

    def test_why_a_prefix_ends_where_it_does(self, http):
        sampling = {"max_new_tokens": 1}

        def report(ids: list[int], **fields: object) -> dict:
            answer = generate(http, input_ids=ids, sampling_params=sampling, return_cache_info=True, **fields).json()
            return answer["meta_info"]["cache"]

        first = report([80, 81, 82, 83])
        assert (first["matched_tokens"], first["matchable_tokens"]) == (0, 3)
        second = report([80, 81, 90, 91, 92])
        assert second["matched_tokens"] == 2
        assert second["first_difference"] == {"position": 2, "token_id": 90, "cached_token_ids": [82]}
        assert (second["evicted_at"], second["evicted_tokens"]) == (None, 0)
        third = report([80, 81, 82, 83])
        assert (third["matched_tokens"], third["first_difference"]) == (3, None)
        assert http.post("/flush_cache").status_code == 200
        fourth = report([80, 81, 82, 83])
        assert abs(fourth["evicted_at"] - time.time()) < 60
        assert (fourth["evicted_tokens"], fourth["evicted_for"], fourth["why"]) == (4, "flush", "evicted")
        assert [told["why"] for told in (first, second, third)] == ["new", "new", None]
        salted = report([80, 81, 82, 83], cache_salt="secret words")
        assert len(salted["namespace"]) == 16
        assert salted["namespace"] != first["namespace"] == fourth["namespace"]
        assert "cache" not in generate(http, input_ids=[5], sampling_params=sampling).json()["meta_info"]

    def test_for_what_an_answer_waited(self, http):
        body = {"text": "word " * 9, "sampling_params": {"max_new_tokens": 2}}
        waited = generate(http, **body, return_waited=True).json()["meta_info"]["waited"]
        assert waited == {"rows": QUEUE_S}  # a text that is as short waits for no thread
        assert "waited" not in generate(http, **body).json()["meta_info"]

    def test_a_stream_tells_it_too(self, http):
        body = {"input_ids": [95, 96], "stream": True, "return_cache_info": True}
        with http.stream("POST", "/generate", json=body | {"sampling_params": {"max_new_tokens": 3}}) as response:
            last = events_of(response)[-1]
        assert last["meta_info"]["cache"]["matchable_tokens"] == 1


def test_a_stream_is_cumulative(http):
    with http.stream(
        "POST", "/generate", json={"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 4}}
    ) as r:
        assert r.headers["content-type"].startswith("text/event-stream")
        events = events_of(r)
    assert all("abca".startswith(event["text"]) for event in events)
    counts = [len(event["output_ids"]) for event in events]
    assert counts == sorted(set(counts)), "every event has more than the one before"
    assert counts == [event["meta_info"]["completion_tokens"] for event in events]
    assert {event["meta_info"]["finish_reason"] for event in events[:-1]} <= {None}
    assert events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}
    whole = generate(http, text="abc", sampling_params={"max_new_tokens": 4}).json()
    assert whole["text"] == events[-1]["text"]


def test_an_incremental_stream_has_only_what_is_new(http):
    body = {
        **{"text": ["abc", "xy"], "stream": True, "incremental": True, "return_logprob": True},
        **{"logprob_start_len": 0, "sampling_params": {"max_new_tokens": 5}},
    }
    with http.stream("POST", "/generate", json=body) as r:
        events = events_of(r)
    wholes = generate(http, **{name: value for name, value in body.items() if name not in ("stream", "incremental")})
    for index, whole in enumerate(wholes.json()):
        own = [event for event in events if event["index"] == index]
        assert "".join(event["text"] for event in own) == whole["text"]
        assert [token for event in own for token in event["output_ids"]] == whole["output_ids"]
        assert not any("output_token_logprobs" in event["meta_info"] for event in own[:-1])
        scores = ("input_token_logprobs", "output_token_logprobs")
        assert [own[-1]["meta_info"][name] for name in scores] == [whole["meta_info"][name] for name in scores]
    refused = generate(http, text="abc", incremental=True)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "incremental"


def test_a_stop_string_across_tokens_ends_the_request_in_the_engine(server: RunningServer):
    before = server.stats()["num_aborted"]
    params = {"max_new_tokens": 1000, "stop": ["cab"]}
    answer = generate(server.http, text="abc", sampling_params=params).json()
    assert answer["text"] == "ab"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "cab"}
    assert answer["meta_info"]["completion_tokens"] == 5
    server.wait_for_stats(num_aborted=before + 1, num_running=0)
    kept = generate(server.http, text="abc", sampling_params={**params, "no_stop_trim": True}).json()
    assert kept["text"] == "abcab"


def test_a_stream_never_shows_the_beginning_of_a_stop_string(http):
    body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 100, "stop": "cab"}}
    with http.stream("POST", "/generate", json=body) as r:
        events = events_of(r)
    assert {event["text"] for event in events} <= {"a", "ab"}
    assert events[-1]["text"] == "ab" and events[-1]["meta_info"]["finish_reason"]["matched"] == "cab"


def test_half_characters_are_held_back(http):
    body = {"text": "é€", "stream": True, "sampling_params": {"max_new_tokens": 5}}
    with http.stream("POST", "/generate", json=body) as r:
        texts = [event["text"] for event in events_of(r)]
    assert set(texts) <= {"", "é", "é€"} and texts == sorted(texts)
    assert texts[-1] == "é€"


def test_a_refused_stream_is_an_ordinary_failure(http):
    response = generate(http, input_ids=[4000], stream=True)
    assert response.status_code == 400
    assert "below 512" in error_of(response)


def test_a_failing_row_is_a_500_with_its_message(http):
    response = generate(http, input_ids=[FAILING_TOKEN])
    assert response.status_code == 500
    assert error_of(response) == "this row failed"


def test_64_streams_at_once(server: RunningServer):
    async def one(http: httpx.AsyncClient, i: int) -> str:
        body = {"text": f"stream {i} ", "stream": True, "sampling_params": {"max_new_tokens": 40}}
        async with http.stream("POST", "/generate", json=body) as response:
            events = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        assert events[-1] == "[DONE]" and len(events) <= 41
        return json.loads(events[-2])["text"]

    async def main() -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=server.http.base_url, timeout=120, limits=limits) as http:
            return await asyncio.gather(*(one(http, i) for i in range(64)))

    for i, text in enumerate(asyncio.run(main())):
        assert text == (f"stream {i} " * 40)[:40]


def test_line_ends_of_other_alphabets_do_not_cut_an_event(http):
    text = "a\u2028b\x85c\u2029d"
    body = {"text": text, "stream": True, "sampling_params": {"max_new_tokens": len(text.encode())}}
    with http.stream("POST", "/generate", json=body) as response:  # httpx cuts lines there, as str.splitlines does
        assert events_of(response)[-1]["text"] == text
