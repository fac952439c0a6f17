"""`/v1/score`, with an engine whose log-probability of token i is always -i."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from jsg.server.native.score import to_scores
from tests.server.running import RunningServer
from tests.server.threads import ServerMaker


def score(http: httpx.Client, **body: object) -> httpx.Response:
    return http.post("/v1/score", json={"query": [20, 21], "items": [[22], [23, 24]], "label_token_ids": [1, 2]} | body)


def test_the_probability_of_each_label_for_each_item(http: httpx.Client):
    answer = score(http).json()
    assert answer["object"] == "scoring" and answer["model"] == "fake"
    assert answer["scores"] == [pytest.approx([math.exp(-1), math.exp(-2)])] * 2
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == 3 + 4
    assert answer["usage"]["completion_tokens"] == 0


def test_with_softmax_the_scores_of_an_item_add_up_to_one(http: httpx.Client):
    for labels in ([1, 2], [2, 1], [500, 501]):
        (scores, _) = score(http, label_token_ids=labels, apply_softmax=True).json()["scores"]
        total = sum(math.exp(-label + min(labels)) for label in labels)
        assert scores == pytest.approx([math.exp(-label + min(labels)) / total for label in labels])
    assert score(http, label_token_ids=[501]).json()["scores"][0] == pytest.approx([math.exp(-501)])


def test_shares_of_next_to_nothing():
    assert to_scores([-2000, -2001], are_shares=False) == [0, 0]
    assert to_scores([-2000, -2001], are_shares=True) == pytest.approx(to_scores([0, -1], are_shares=True))
    assert to_scores([-2000, -math.inf], are_shares=True) == [1, 0]
    assert to_scores([-math.inf, -math.inf], are_shares=True) == [0, 0]


def test_texts_are_put_together_before_they_are_encoded(server: RunningServer):
    def cached(text: str) -> int:
        body = {"text": text, "sampling_params": {"max_new_tokens": 1}}
        return server.http.post("/generate", json=body).json()["meta_info"]["cached_tokens"]

    answer = score(server.http, query="Is it so? ", items=["yes!", "no"]).json()
    assert answer["usage"]["prompt_tokens"] == 14 + 12
    assert cached("Is it so? yes!") == 13
    assert len(score(server.http, query="why ", items="one").json()["scores"]) == 1
    assert cached("why one") == 6
    score(server.http, query=" behind", items=["before"], item_first=True)
    assert cached("before behind") == 12
    score(server.http, query=[40], items=[[41, 42]], item_first=True)
    body = {"input_ids": [41, 42, 40], "sampling_params": {"max_new_tokens": 1}}
    assert server.http.post("/generate", json=body).json()["meta_info"]["cached_tokens"] == 2


def test_the_prefix_of_the_items_is_shared(http: httpx.Client):
    query = list(range(100, 150))
    score(http, query=query, items=[[1], [2]])
    assert score(http, query=query, items=[[3], [4]]).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 100}


def test_a_key_shares_with_itself_only(make_server: ServerMaker):
    with make_server(server={"api_key": ("a", "b")}) as server:
        cached = []
        for key in ("a", "b", "a"):
            server.http.headers["Authorization"] = f"Bearer {key}"
            usage = score(server.http, items=[[5]]).json()["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 0, 2]


@pytest.mark.parametrize(
    ("changes", "param", "said"),
    [
        ({"items": []}, "items", "1 to 1024 items"),
        ({"items": [[1]] * 1025}, "items", "1 to 1024 items, but has 1025"),
        ({"items": ["text"]}, "items", "all texts or all token ids"),
        ({"query": "text"}, "items", "all texts or all token ids"),
        ({"items": [[1], "x"]}, "items", "items"),
        ({"items": None}, "items", "items"),
        ({"query": [-1]}, "query", "query"),
        ({"query": [512]}, "items", "below 512"),
        ({"query": [1] * 1023}, "items", "at most 1023 tokens, but with items[0] they have 1024"),
        ({"query": [], "items": [[1], []]}, "items", "at least one token, but with items[1] they have none"),
        ({"label_token_ids": []}, "label_token_ids", "label_token_ids"),
        ({"label_token_ids": None}, "label_token_ids", "label_token_ids"),
        ({"label_token_ids": [512]}, "label_token_ids", "below 512, but got 512"),
        ({"label_token_ids": [True]}, "label_token_ids", "label_token_ids"),
        ({"label_token_ids": [1] * 129}, "label_token_ids", "at most 128"),
        ({"items": [[1]] * 1024, "label_token_ids": [1] * 128, "apply_softmax": "yes"}, "apply_softmax", "apply"),
        ({"model": "other"}, None, "other"),
        ({"text_1": "a", "text_2": "b"}, "text_1", "text_1 is not supported: "),
        ({"temperature": 1}, "temperature", "temperature"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, changes: dict, param: str | None, said: str):
    response = score(http, **changes)
    assert response.status_code == (404 if "model" in changes else 400), response.text
    error = response.json()["error"]
    assert said in error["message"]
    if param is not None:
        assert error["param"] == param, json.dumps(error)


def test_one_that_fails_fails_all(http: httpx.Client):
    assert score(http, query=[511]).status_code == 500


def test_one_that_is_aborted_has_no_scores(make_server: ServerMaker):
    with make_server(engine={"max_running_requests": 1}) as server:
        long = {"input_ids": [1], "stream": True, "sampling_params": {"max_new_tokens": 1000}}
        with server.http.stream("POST", "/generate", json=long) as response, ThreadPoolExecutor(1) as pool:
            events = response.iter_raw()
            next(events)
            scoring = pool.submit(score, server.http)
            server.wait_for_stats(num_waiting=2)
            assert server.http.post("/abort_request", json={"abort_all": True}).json()["aborted"] == 3
            aborted = scoring.result(20)
        assert aborted.status_code >= 400 and aborted.json()["error"]["code"] == "request_aborted"
