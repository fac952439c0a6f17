"""Compiled programs on a real server over a real socket: requests are counted, and what was cached is found."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import jsg as sgl
from tests.server.running import RunningServer

GREEDY = {"temperature": 0, "ignore_eos": True}
INSTRUCTION = "You answer questions in a few words, and you never say that you do not know. Question: "


@sgl.function
def judge(s, topic):
    s += INSTRUCTION + topic
    s += sgl.gen("essay", max_tokens=6, **GREEDY)
    branches = s.fork(3)
    branches += lambda i: f" ({i}) " + sgl.gen("mark", max_tokens=3, **GREEDY)
    branches.join()
    s += " so " + sgl.select("verdict", ["good", "bad"])


@pytest.fixture
def server(real_server: RunningServer) -> RunningServer:
    real_server.reset()
    return real_server


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
    compiled = judge.compile()
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
    judge.cache(endpoint)
    assert paths.count("/generate") == 1
    server.wait_for_stats(num_holds=0)
    meta = judge.run("why?", backend=endpoint).get_meta_info("essay")
    assert meta["cached_tokens"] == meta["prompt_tokens"] - len("why?"), "the tokens of this model are bytes"
