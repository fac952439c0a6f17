"""Several replicas of the application reuse nearly as much as one server with the pools of all."""

import concurrent.futures
import itertools
from pathlib import Path

import httpx
import pytest

import jsg
from bench.data_parallel import LOADS, POOL_TOKENS, Load
from bench.serving.workloads import WORKLOADS, Session, Writer
from tests.ray.application import RAY_PYTHON, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not RAY_PYTHON.exists(), reason="needs Ray, which `make test-long` installs beside the rest"),
]

NUM_REPLICAS = 2
CONCURRENCY = 16
NAMES = ("1 prefix", "16 prefixes", "48 prefixes", "chats")
TOKENS_PER_WORD = 1.6  # of the embedded model
LEAST = 0.95


def talk(http: httpx.Client, session: Session) -> tuple[int, int]:
    """Sends the turns of a session. Returns the tokens of its prompts, and how many of them were cached."""
    said, prompt_tokens, cached_tokens = "", 0, 0
    for turn in session.turns:
        assert isinstance(turn.text, str)
        said += turn.text
        body = {"model": "tiny", "prompt": said, "max_tokens": turn.max_tokens, "ignore_eos": True, "temperature": 0}
        answer = http.post("/v1/completions", json=body).raise_for_status().json()
        said += answer["choices"][0]["text"]
        prompt_tokens += answer["usage"]["prompt_tokens"]
        cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return prompt_tokens, cached_tokens


def hit_rate(http: httpx.Client, name: str) -> float:
    load: Load = LOADS[name]
    # Each load has texts of its own, so what the one before has left in the caches is of no use to it.
    made = WORKLOADS[load.workload](load.shape, Writer(tokens_per_word=TOKENS_PER_WORD), NAMES.index(name))
    sessions = list(itertools.islice(made, load.num_sessions))
    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as pool:
        counts = list(pool.map(lambda session: talk(http, session), sessions))
    return sum(cached for _, cached in counts) / sum(prompt for prompt, _ in counts)


def test_hit_rate(tmp_path: Path) -> None:
    options = {"context_length": 2048, "chunked_prefill_size": 256}
    with (
        jsg.Runtime(max_total_tokens=POOL_TOKENS, max_running_requests=CONCURRENCY, **options) as runtime,
        httpx.Client(base_url=runtime.url, timeout=120) as http,
    ):
        pooled = {name: hit_rate(http, name) for name in NAMES}
    of_each = f"--max-total-tokens {POOL_TOKENS // NUM_REPLICAS} --max-running-requests {CONCURRENCY // NUM_REPLICAS}"
    more = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in options.items())
    with running(tmp_path, 8742, f"replicas={NUM_REPLICAS}", f"options={of_each} {more}") as app:
        app.wait_until_all_answer()
        several = {name: hit_rate(app.http, name) for name in NAMES}
    for name in NAMES:
        print(f"{name}: {pooled[name]:.4f} pooled, {several[name]:.4f} of {NUM_REPLICAS}")
    assert {name: several[name] >= LEAST * pooled[name] for name in NAMES} == dict.fromkeys(NAMES, True)
