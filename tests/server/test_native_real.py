"""SGLang's interface on the embedded model: `jsg serve` with the real engine behind it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow

CONTEXT = "The capital of France is Paris. The capital of Italy is"
FEW_PROGRAMS = ("--deterministic", "--max-running-requests", "4")
GREEDY = {"max_new_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    process = subprocess.Popen(
        [sys.executable, "-m", "jsg.cli", "serve", "--port", "0", "--max-total-tokens", "4096", *FEW_PROGRAMS],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    with process:
        try:
            address = process.stdout.readline().split(" is ready at ")[1].split()[0]
            with httpx.Client(base_url=address, timeout=60) as client:
                yield client
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def generate(http: httpx.Client, **body: Any) -> Any:
    response = http.post("/generate", json={"sampling_params": GREEDY} | body)
    assert response.status_code == 200, response.text
    return response.json()


def ids_of(http: httpx.Client, text: str) -> list[int]:
    return http.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_scores_are_the_probabilities_that_generate_reports(http: httpx.Client):
    labels = [5, 100, 1000, 7]
    items = [" Rome", " Berlin", " a city that"]
    body = {"query": CONTEXT, "items": items, "label_token_ids": labels}
    scores = http.post("/v1/score", json=body).json()["scores"]
    shares = http.post("/v1/score", json=body | {"apply_softmax": True}).json()["scores"]
    for item, score, share in zip(items, scores, shares, strict=True):
        meta = generate(http, text=CONTEXT + item, return_logprob=True, token_ids_logprob=labels)["meta_info"]
        shown = meta["output_token_ids_logprobs"][0]
        assert [token_id for _, token_id, _ in shown] == labels
        wanted = [math.exp(logprob) for logprob, _, _ in shown]
        assert score == pytest.approx(wanted, rel=1e-3)
        assert share == pytest.approx([value / sum(wanted) for value in wanted], rel=1e-3)
        assert 0 < sum(score) < 1
        assert sum(share) == pytest.approx(1)


def test_all_labels_together_are_certain(http: httpx.Client):
    """The probabilities of the whole vocabulary, some labels at a time, add up to one."""
    vocab_size = http.get("/model_info").json()["vocab_size"]
    total = 0.0
    for start in range(0, vocab_size, 128):
        labels = list(range(start, min(start + 128, vocab_size)))
        body = {"query": CONTEXT, "items": "", "label_token_ids": labels}
        total += sum(http.post("/v1/score", json=body).json()["scores"][0])
    assert total == pytest.approx(1, abs=1e-3)


def test_why_it_missed(http: httpx.Client):
    ids = ids_of(http, "A prefix that is shared up to here, and then it goes on in its own way.")
    other = [*ids[:10], (ids[10] + 1) % 1000, *ids[11:]]

    def report(prompt: list[int]) -> dict:
        return generate(http, input_ids=prompt, return_cache_info=True)["meta_info"]["cache"]

    assert report(ids)["matched_tokens"] == 0
    missed = report(other)
    assert missed["matched_tokens"] == 10
    assert missed["first_difference"] == {"position": 10, "token_id": other[10], "cached_token_ids": [ids[10]]}
    hit = report(ids)
    assert hit["matched_tokens"] == hit["matchable_tokens"] == len(ids) - 1
    assert hit["first_difference"] is None


def test_the_tree_is_shown_without_what_is_in_it(http: httpx.Client):
    ids = ids_of(http, "Nothing of this text may be seen in the dump of the cache.")
    meta = generate(http, input_ids=ids, cache_salt="hide me", return_cache_info=True)["meta_info"]
    response = http.get("/debug/radix")
    lengths = [node[2] for node in response.json()["nodes"]]
    assert meta["cache"]["matchable_tokens"] <= max(lengths)
    for hidden in ("hide me", "Nothing", json.dumps(ids)[1:20]):
        assert hidden not in response.text
    shown = http.get("/debug/radix?text=true").json()
    assert any(text.startswith("Nothing of this text") for text in shown["texts"].values())
    pool = shown["pool"]
    assert pool["total"] == sum(pool[term] for term in pool["terms"])


def test_a_probe_makes_a_token_that_nobody_shares(http: httpx.Client):
    before = http.get("/server_info").json()["internal_states"][0]["generated_tokens"]
    assert http.get("/health_generate").status_code == 200
    assert http.get("/server_info").json()["internal_states"][0]["generated_tokens"] == before + 1
    assert generate(http, input_ids=[0, 0])["meta_info"]["cached_tokens"] == 0
