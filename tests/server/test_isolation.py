"""One key's requests and cache do not affect another key, neither in answers nor in their times."""

import contextlib
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.running import LONG, RunningServer
from tests.server.threads import ServerMaker

KEY_A, KEY_B = ({"Authorization": f"Bearer key-{name}"} for name in "ab")
ADMIN = {"x-api-key": "key-z"}
ONE = {"max_new_tokens": 1}


@pytest.fixture(scope="module")
def shared(make_server: ServerMaker) -> Iterator[RunningServer]:
    with make_server(server={"api_key": ("key-a", "key-b"), "admin_api_key": "key-z"}) as server:
        yield server


def post(server: RunningServer, path: str, headers: dict[str, str], **body: Any) -> Any:
    response = server.http.post(path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    return response.json()


def cached_tokens(server: RunningServer, headers: dict[str, str], text: str, **body: Any) -> int:
    return post(server, "/generate", headers, text=text, sampling_params=ONE, **body)["meta_info"]["cached_tokens"]


class TestRequests:
    def test_a_name_may_be_used_by_each(self, shared: RunningServer):
        before = shared.stats(KEY_A)["num_added"]
        with contextlib.ExitStack() as clients:
            for headers in (KEY_A, KEY_B):
                clients.enter_context(
                    contextlib.closing(shared.send("/generate", {**LONG, "rid": "same"}, headers))
                )  # fmt: skip
            shared.wait_for_stats(KEY_A, num_added=before + 2, num_running=2)
            again = shared.http.post("/generate", json={**LONG, "rid": "same"}, headers=KEY_A)
            assert again.status_code == 400
        shared.wait_for_stats(KEY_A, num_running=0)

    def test_nobody_can_end_anothers_or_learn_that_it_runs(self, shared: RunningServer):
        with shared.http.stream("POST", "/generate", json={**LONG, "rid": "mine"}, headers=KEY_A) as response:
            lines = response.iter_lines()
            next(lines)
            tried = shared.http.post("/abort_request", json={"rid": "mine"}, headers=KEY_B)
            unknown = shared.http.post("/abort_request", json={"rid": "nobody's"}, headers=KEY_B)
            assert (tried.status_code, tried.text) == (unknown.status_code, unknown.text)
            named = shared.http.post("/generate", json={"text": "a", "rid": "mine"}, headers=KEY_B)
            assert named.status_code == 200, "that the name is taken is nobody's business"
            assert shared.stats(KEY_A)["num_running"] == 1
            assert post(shared, "/abort_request", KEY_A, rid="mine")["aborted"] == 1
            last = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line][-1]
            assert last["meta_info"]["finish_reason"]["type"] == "abort"


class TestCache:
    def test_a_prompt_is_cached_for_its_owner_only(self, shared: RunningServer):
        text = "1: a prompt of key a"  # no other prompt of this file begins with its first letter
        assert cached_tokens(shared, KEY_A, text) == 0 and cached_tokens(shared, KEY_A, text) == len(text) - 1
        assert cached_tokens(shared, KEY_B, text) == 0
        assert cached_tokens(shared, ADMIN, text) == 0, "not even for the admin"

    @pytest.mark.parametrize(("field", "text"), [("cache_salt", "2: salted"), ("extra_key", "3: salted")])
    def test_the_same_salt_opens_nothing(self, shared: RunningServer, field, text):
        salted = {field: "salt"}
        assert cached_tokens(shared, KEY_A, text, **salted) == 0
        assert cached_tokens(shared, KEY_A, text, **salted) == len(text) - 1
        assert cached_tokens(shared, KEY_B, text, **salted) == 0 and cached_tokens(shared, KEY_A, text) == 0

    def test_every_api_keeps_them_apart(self, shared: RunningServer):
        prompt = "of every API " * 4
        messages = [{"role": "user", "content": prompt}]
        calls: dict[str, dict[str, Any]] = {
            "/v1/completions": {"prompt": prompt, "max_tokens": 1},
            "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
            "/v1/responses": {"input": prompt, "max_output_tokens": 1},
            "/v1/messages": {"messages": messages, "max_tokens": 1, "model": "fake"},
        }
        for path, body in calls.items():
            for headers in (KEY_A, KEY_B):
                usage = post(shared, path, headers, **body, cache_salt=path)["usage"]
                assert cached_in(usage) == 0, (path, headers)
            assert cached_in(post(shared, path, KEY_A, **body, cache_salt=path)["usage"]) > 0, path

    def test_why_it_missed_is_not_that_somebody_else_had_it(self, shared: RunningServer):
        def report(headers: dict[str, str], text: str) -> dict[str, Any]:
            body = {"text": text, "sampling_params": ONE, "return_cache_info": True}
            told = post(shared, "/generate", headers, **body)["meta_info"]["cache"]
            if told["first_difference"] is not None:
                del told["first_difference"]["token_id"]  # of the prompt that was sent
            return told

        texts = ["4: why did it miss?", "5: why did it miss?", "6: why did it miss?"]
        post(shared, "/flush_cache", ADMIN)
        for text in texts[:2]:
            cached_tokens(shared, KEY_A, text)
        assert report(KEY_A, texts[0])["matched_tokens"] > 0
        never_seen, seen_by_a = report(KEY_B, texts[2]), report(KEY_B, texts[1])
        never_seen["first_difference"] = seen_by_a["first_difference"] = None  # the first of them is there by then
        assert seen_by_a == never_seen and never_seen["why"] == "new"
        assert report(ADMIN, texts[0] + " And more")["why"] == "namespace", "an admin may know"
        post(shared, "/flush_cache", ADMIN)
        assert report(KEY_A, texts[0])["evicted_at"] is not None
        assert report(KEY_B, texts[0])["evicted_at"] is None

    def test_metrics_are_of_all_together(self, shared: RunningServer):
        text = shared.http.get("/metrics", headers=KEY_A).text
        assert "jsg:" in text
        assert "key-" not in text and "tenant" not in text


def cached_in(usage: dict[str, Any]) -> int:
    """Cached tokens in the form of any API."""
    for details in ("prompt_tokens_details", "input_tokens_details"):
        if details in usage:
            return usage[details]["cached_tokens"]
    return usage["cache_read_input_tokens"]


PROMPT_TOKENS = 600
NUM_ACROSS = 200  # pairs; chance alone then reaches an AUC of 0.6 in one of 3000 runs
NUM_WITHIN = 40


@pytest.mark.slow
@pytest.mark.long
class TestTiming:
    """How well the time to the first token tells a prompt that is cached for somebody from one that is not.

    It is long because it takes thousands of requests, and a machine that does nothing else.
    """

    @pytest.fixture(scope="class")
    @classmethod
    def real(cls, make_real_server: ServerMaker) -> Iterator[RunningServer]:
        with make_real_server("--api-key", "key-a", "--api-key", "key-b") as server:
            yield server

    def auc(self, server: RunningServer, prober: dict[str, str], num_pairs: int, seed: int) -> float:
        """The part of pairs in which a prompt that key A has sent before is answered sooner than a new one."""
        rng = random.Random(seed)
        seen_s, new_s = [], []
        for _ in range(num_pairs + 5):
            seen, new = ([rng.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(2))
            first_token_s(server, KEY_A, seen)
            trials = [(seen, seen_s), (new, new_s)]
            rng.shuffle(trials)
            for prompt, times in trials:
                times.append(first_token_s(server, prober, prompt))
        seen_s, new_s = seen_s[5:], new_s[5:]  # the first ones warm caches of the machine
        wins = sum((a < b) + (a == b) / 2 for a in seen_s for b in new_s)
        return wins / (len(seen_s) * len(new_s))

    def test_within_one_key_it_tells(self, real: RunningServer):
        assert self.auc(real, KEY_A, NUM_WITHIN, seed=1) > 0.9

    def test_across_keys_it_does_not(self, real: RunningServer):
        auc = self.auc(real, KEY_B, NUM_ACROSS, seed=2)
        assert max(auc, 1 - auc) < 0.6


def first_token_s(server: RunningServer, headers: dict[str, str], input_ids: list[int]) -> float:
    body = {"input_ids": input_ids, "stream": True, "sampling_params": ONE}
    started = time.perf_counter()
    with server.http.stream("POST", "/generate", json=body, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        elapsed = time.perf_counter() - started
        list(lines)
    return elapsed
