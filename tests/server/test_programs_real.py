"""Prompts in parts, holds, choices and whole programs, on a real engine over a real socket.

`tests/lang/test_endpoint_real.py` is the fast one: there the language sends them, to one server for all its files.
"""

import json
import random
import string
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import jsg as sgl
from tests.server.battery import rss_bytes
from tests.server.running import RunningServer, ServerProcess

pytestmark = pytest.mark.slow

PROMPT = "In the beginning there was a prompt of some length, and it said: "


@pytest.fixture
def server(real_server: RunningServer) -> RunningServer:
    real_server.reset()
    return real_server


def generate(http: httpx.Client, prompt: list, *, max_new_tokens: int = 12, **body: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True}
    response = http.post("/generate", json={"prompt": prompt, "sampling_params": sampling} | body)
    assert response.status_code == 200, response.text
    return response.json()


def test_positions_and_branches_change_the_answer_as_they_should(http: httpx.Client):
    plain = generate(http, [PROMPT, "a", "b", "end"])
    no_shift = generate(http, [PROMPT, {"offset": 0}, "abend"])
    shifted = generate(http, [PROMPT, {"offset": 500}, "abend"])
    alone = generate(http, [PROMPT, {"branches": [["ab"]]}, "end"])
    apart = generate(http, [PROMPT, {"branches": [["a"], ["b"]]}, "end"])
    assert plain["output_ids"] == no_shift["output_ids"] == alone["output_ids"]
    assert shifted["output_ids"] != plain["output_ids"]
    assert apart["meta_info"]["part_ids"][1:3] == [[64], [65]]


# Compiled programs through a `RuntimeEndpoint`: how often it asks, and what it finds in the cache.

GREEDY = {"temperature": 0, "ignore_eos": True}
INSTRUCTION = "You answer questions in a few words, and you never say that you do not know. Question: "


@sgl.function
def judge_topic(s, topic):
    s += INSTRUCTION + topic
    s += sgl.gen("essay", max_tokens=6, **GREEDY)
    branches = s.fork(3)
    branches += lambda i: f" ({i}) " + sgl.gen("mark", max_tokens=3, **GREEDY)
    branches.join()
    s += " so " + sgl.select("verdict", ["good", "bad"])


@pytest.fixture
def endpoint(server: RunningServer) -> Iterator[sgl.RuntimeEndpoint]:
    with sgl.RuntimeEndpoint(str(server.http.base_url)) as endpoint:
        assert sgl.flush_cache(endpoint)
        yield endpoint
        server.wait_for_stats(num_running=0, num_holds=0)


@pytest.fixture
def paths(endpoint: sgl.RuntimeEndpoint, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of all requests of endpoints from here on."""
    send, sent = httpx.AsyncClient.send, []

    async def noted(self: httpx.AsyncClient, request: httpx.Request, **options: Any) -> httpx.Response:
        sent.append(request.url.path)
        return await send(self, request, **options)

    monkeypatch.setattr(httpx.AsyncClient, "send", noted)
    return sent


def test_sent_whole_it_is_one_round_trip_and_call_by_call_many(endpoint: sgl.RuntimeEndpoint, paths: list[str]):
    compiled = judge_topic.compile()
    for stream in (False, True):
        state = compiled.run("why?", backend=endpoint, stream=stream)
        assert state.error() is None and len(state["mark"]) == 3 and state["verdict"] in ("good", "bad")
        assert paths == ["/v1/programs"]
        paths.clear()
    state = compiled.run("why?", backend=endpoint, where="here")
    assert state.error() is None
    assert paths.count("/generate") >= 4 and paths.count("/select") == 1 and "/v1/programs" not in paths


def test_cache_has_a_server_compute_what_a_program_begins_with(
    endpoint: sgl.RuntimeEndpoint, server: RunningServer, paths: list[str]
):
    judge_topic.cache(endpoint)
    assert paths.count("/generate") == 1
    server.wait_for_stats(num_holds=0)
    state = judge_topic.run("why?", backend=endpoint)
    assert state.error() is None, "so that nothing of it runs when the endpoint is closed"
    meta = state.get_meta_info("essay")
    assert meta["cached_tokens"] == meta["prompt_tokens"] - len("why?"), "the tokens of this model are bytes"


def costly(rng: random.Random) -> str:
    """A pattern of half a kilobyte that may be read in very many ways."""
    words = ("".join(rng.choices(string.ascii_lowercase, k=3)) for _ in range(35))
    return ('(".{0,180}|' + "|".join(f".{{0,{rng.randrange(20, 60)}}}{word}" for word in words)) + ")*"


def with_patterns(rng: random.Random) -> dict[str, Any]:
    @sgl.function
    def program(s, q):
        for pattern in [costly(rng) for _ in range(3)]:
            sgl.cond(s, sgl.matches(q, pattern), lambda s: s.extend("yes "), lambda s: s.extend("no "))

    text = '"' + "".join(rng.choices(string.ascii_lowercase, k=20_000))
    return {"graph": json.loads(program.compile().to_json()), "arguments": {"q": text}}


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.slow
def test_s7_the_costliest_patterns_leave_the_front_to_others(real_server: ServerProcess):
    """Each post took the front seconds and tens of megabytes while it compiled patterns itself, and numba with it."""
    http, pid = real_server.http, real_server.process.pid
    posts = [with_patterns(random.Random(number)) for number in range(24)]
    chat = {"prompt": PROMPT, "max_tokens": 4}
    http.post("/v1/completions", json=chat).raise_for_status()
    cpu_before, rss_before = cpu_s(pid), rss_bytes(pid)
    num_chats = 0
    with ThreadPoolExecutor(6) as threads:
        sent = [threads.submit(http.post, "/v1/programs", json=post, timeout=600) for post in posts]
        while not all(future.done() for future in sent):
            http.post("/v1/completions", json=chat, timeout=600).raise_for_status()
            num_chats += 1
            time.sleep(0.05)
    # Whether a post has its turn within ten seconds depends on the machine, what the front does for it does not.
    answers = [future.result() for future in sent]
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert all("more text" in answer.text for answer in answers if answer.status_code == 200)
    assert cpu_s(pid) - cpu_before < 1.0 * len(posts) + 0.2 * num_chats
    assert rss_bytes(pid) - rss_before < 40 * 2**20
    assert "llvmlite" not in Path(f"/proc/{pid}/maps").read_text()
