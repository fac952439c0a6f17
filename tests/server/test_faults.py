"""Clients that disconnect, rows that fail, and an engine that is busy or gone: which requests fail, and which do not.

Against the scripted engine at all times, and as `slow` against the real one with a small random model.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from bench import served
from tests.engine.fake_core import FAILING_TOKEN, RAISING_TOKEN
from tests.server.real_model import NAN_TOKEN, VOCAB
from tests.server.running import (
    LONG_STREAMS,
    POLL_DEADLINE_S,
    ProcessMaker,
    RunningServer,
    ServerProcess,
    check_discreet,
    is_running,
    wait_until,
)
from tests.server.threads import ServerMaker, ServerThread

MAX_RUNNING = 8
LASTING = {"temperature": 0, "ignore_eos": True}
IDLE = {"num_running": 0, "num_waiting": 0, "num_uncached_tokens": 0, "num_protected_tokens": 0}


@dataclasses.dataclass
class Bench:
    """A server, and what takes it long.

    Attributes:
        prompt_len: Tokens of a prompt whose prefill takes seconds; 0 where a prefill takes no time.
        num_tokens: Tokens of an answer that takes seconds.
        failing_ids: A prompt that fails in the engine.
    """

    server: RunningServer
    prompt_len: int
    num_tokens: int
    failing_ids: list[int]

    def body(self, seed: int, prompt_len: int = 20, num_tokens: int | None = None, **fields: Any) -> dict[str, Any]:
        """A greedy request with its own prompt."""
        sampling = {"max_new_tokens": num_tokens or self.num_tokens, "temperature": 0, "ignore_eos": True}
        return {
            "input_ids": ids_of(seed, prompt_len),
            "sampling_params": sampling | fields.pop("sampling", {}),
            **fields,
        }


def ids_of(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(count)]


@pytest.fixture(scope="module", params=["fake", pytest.param("real", marks=pytest.mark.slow)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    if request.param == "fake":
        make: ServerMaker = request.getfixturevalue("make_server")
        with make(engine={"max_running_requests": MAX_RUNNING}) as server:
            yield Bench(server, prompt_len=0, num_tokens=900, failing_ids=[FAILING_TOKEN, 1])
    else:
        server = request.getfixturevalue("real_server")
        yield Bench(server, prompt_len=20_000, num_tokens=4000, failing_ids=[5, NAN_TOKEN, 7])


def requests_in(state: str, bench: Bench) -> dict[str, Any]:
    """The body of a request that will be in that state for a while."""
    match state:
        case "queued" | "decoding":
            return bench.body(1)
        case "prefilling":
            return bench.body(2, prompt_len=bench.prompt_len)
        case "list":
            return bench.body(3) | {"input_ids": [ids_of(seed, 20) for seed in range(4)]}
        case _:
            return bench.body(4, sampling={"n": 3})


NUM_ANSWERS = {"queued": 1, "decoding": 1, "prefilling": 1, "list": 4, "n": 3}


@contextlib.contextmanager
def full(bench: Bench) -> Iterator[None]:
    """As many other requests as can run."""
    with contextlib.ExitStack() as clients:
        for seed in range(MAX_RUNNING):
            clients.enter_context(contextlib.closing(bench.server.send("/generate", bench.body(100 + seed))))
        bench.server.wait_for_stats(num_running=MAX_RUNNING)
        yield
    bench.server.wait_for_stats(**IDLE)


class TestLeaving:
    """A client that leaves, or says that it wants no more, leaves nothing behind."""

    @pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
    @pytest.mark.parametrize("way", ["disconnect", "abort"])
    @pytest.mark.parametrize("state", NUM_ANSWERS)
    def test_everything_is_free_after_the_step_in_flight(self, bench: Bench, state: str, way: str, is_stream: bool):
        if state == "prefilling" and not bench.prompt_len:
            pytest.skip("the scripted engine takes a prompt in one step")
        server, count = bench.server, NUM_ANSWERS[state]
        server.wait_for_stats(**IDLE)
        others = MAX_RUNNING if state == "queued" else 0
        with full(bench) if others else contextlib.nullcontext():
            before = server.stats()
            connection = server.send("/generate", requests_in(state, bench) | {"stream": is_stream, "rid": "leaver"})
            with contextlib.closing(connection):
                wait_until(lambda: self.is_in(server.stats(), before, state))
                if way == "abort":
                    aborted = server.http.post("/abort_request", json={"rid": "leaver"}).json()["aborted"]
                    assert aborted == count
                else:
                    connection.close()
                self.check_freed(server, before, count, others)
                if way == "abort":
                    self.check_told(connection.getresponse(), count)
            if state == "prefilling":
                assert server.stats()["generated_tokens"] == before["generated_tokens"], "its prefill had ended"

    def is_in(self, stats: dict[str, Any], before: dict[str, Any], state: str) -> bool:
        match state:
            case "queued":
                return stats["num_waiting"] == 1
            case "prefilling":
                return stats["num_running"] == 1 and stats["num_steps"] >= before["num_steps"] + 3
        grown = stats["generated_tokens"] - before["generated_tokens"]
        return stats["num_running"] == NUM_ANSWERS[state] and grown > 2 * NUM_ANSWERS[state]

    def check_freed(self, server: RunningServer, before: dict[str, Any], count: int, others: int) -> None:
        """Once the engine has read the abort, at most the step in flight still ends."""
        deadline = time.monotonic() + POLL_DEADLINE_S
        while (seen := server.stats())["num_aborted"] < before["num_aborted"] + count:
            assert time.monotonic() < deadline, seen
        last = server.stats()
        assert last["num_running"] == others and last["num_waiting"] == 0
        if not others:
            assert IDLE.items() <= last.items()
            assert last["num_steps"] <= seen["num_steps"] + 1
        assert last["num_aborted"] == before["num_aborted"] + count

    def check_told(self, response: Any, count: int) -> None:
        text = response.read().decode()
        assert response.status == 200
        assert text.count('"type":"abort"') == count

    @pytest.mark.parametrize("is_stream", [True, False], ids=["stream", "whole"])
    @pytest.mark.parametrize("path", LONG_STREAMS)
    def test_of_every_api(self, server: RunningServer, path: str, is_stream: bool):
        server.wait_for_stats(**IDLE)
        before = server.stats()
        with contextlib.closing(server.send(path, LONG_STREAMS[path] | {"stream": is_stream})):
            wait_until(lambda: server.stats()["generated_tokens"] > before["generated_tokens"] + 2)
        self.check_freed(server, before, count=1, others=0)

    def test_the_others_go_on(self, bench: Bench):
        server = bench.server
        alone = [self.tokens(server, bench.body(seed, num_tokens=60)) for seed in range(4)]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = [pool.submit(self.tokens, server, bench.body(seed, num_tokens=60)) for seed in range(4)]
            for seed in range(20):
                server.send("/generate", bench.body(50 + seed, stream=bool(seed % 2))).close()
            assert [answer.result() for answer in answers] == alone
        server.wait_for_stats(**IDLE)

    def tokens(self, server: RunningServer, body: dict[str, Any]) -> list[int]:
        return server.http.post("/generate", json=body).json()["output_ids"]


class TestFailingRows:
    """Only the client of a failing request gets its error."""

    def test_the_rest_of_the_batch_finishes_with_the_right_tokens(self, bench: Bench):
        server, good = bench.server, [bench.body(seed, num_tokens=40) for seed in range(5)]
        engine = engine_of(server)
        alone = [server.http.post("/generate", json=body).json()["output_ids"] for body in good]
        assert all(len(tokens) == 40 for tokens in alone)
        failing = {**good[0], "input_ids": bench.failing_ids}
        over_vocabulary = {**good[0], "input_ids": [VOCAB * 10]}
        too_long = {**good[0], "input_ids": [1] * 70_000}
        bad = [(failing, 500), ({**failing, "stream": True}, 500), (over_vocabulary, 400), (too_long, 400)]
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            answers = [pool.submit(server.http.post, "/generate", json=body) for body in good]
            failures = [(pool.submit(server.http.post, "/generate", json=body), status) for body, status in bad * 2]
            for failure, status in failures:
                assert failure.result().status_code == status and failure.result().json()["error"]["message"]
                check_discreet(failure.result().text)
            assert [answer.result().json()["output_ids"] for answer in answers] == alone
        server.wait_for_stats(**IDLE)
        assert engine_of(server) == engine

    def test_one_of_a_list_fails_the_list_and_nothing_else(self, bench: Bench):
        server = bench.server
        body = bench.body(7, num_tokens=30)
        alone = server.http.post("/generate", json=body).json()["output_ids"]
        listed = {**body, "input_ids": [body["input_ids"], bench.failing_ids], "stream": True}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answer = pool.submit(server.http.post, "/generate", json=body)
            with server.http.stream("POST", "/generate", json=listed) as response:
                lines = [line for line in response.iter_lines() if line]
            assert response.status_code == 500 or json.loads(lines[-2].removeprefix("data: "))["error"]
            assert answer.result().json()["output_ids"] == alone
        server.wait_for_stats(**IDLE)

    def test_what_the_engine_does_not_expect_is_one_requests_failure(self, server: RunningServer):
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = [pool.submit(server.http.post, "/generate", json={"text": "abc"}) for _ in range(4)]
            failed = server.http.post("/generate", json={"input_ids": [RAISING_TOKEN]})
            assert failed.status_code == 500
            assert "cannot be added" not in failed.text, "what the engine said is for the log"
            assert all(answer.result().json()["text"].startswith("abcabc") for answer in answers)
        assert engine_of(server) == [True]


@pytest.mark.slow
class TestBusyEngine:
    """A real engine under a load of long prompts."""

    def test_health_is_true_and_every_stream_hears_of_its_death(self, make_real_server: ProcessMaker):
        with make_real_server() as server, contextlib.ExitStack() as stack:
            engine = engine_of(server)
            for seed in range(12):
                body = {"input_ids": ids_of(seed, 15_000), "stream": True, "sampling_params": {"max_new_tokens": 8}}
                stack.enter_context(contextlib.closing(server.send("/generate", body)))
            wait_until(lambda: server.stats()["num_running"] + server.stats()["num_waiting"] == 12)
            before = server.stats()
            assert all(server.http.get("/health").status_code == 200 for _ in range(100))
            after = server.stats()
            assert after["num_steps"] > before["num_steps"], "the engine had nothing to do"
            assert after["num_waiting"] + after["num_running"] > 0, "the load was too small"
            server.reset()
            body = {"text": "ab", "stream": True, "sampling_params": LASTING | {"max_new_tokens": 8000}}
            streams = []
            for _ in range(MAX_RUNNING):
                response = stack.enter_context(server.http.stream("POST", "/generate", json=body))
                lines = response.iter_lines()
                next(lines)
                streams.append(lines)
            os.kill(engine, signal.SIGKILL)
            for lines in streams:
                last = [line for line in lines if line][-2]
                assert "engine process ended" in json.loads(last.removeprefix("data: "))["error"]["message"]
            with contextlib.suppress(httpx.TransportError):  # the front may be gone by now
                assert server.http.get("/health").status_code == 503
                assert server.http.post("/generate", json={"text": "a"}).status_code == 503
            assert server.end()[0] == 2
            assert not is_running(engine)

    def test_a_signal_lets_it_finish_and_then_no_longer(self, make_real_server: ProcessMaker):
        with make_real_server("--shutdown-timeout", "4") as server, concurrent.futures.ThreadPoolExecutor() as pool:
            engine = engine_of(server)
            bodies = [{"text": "ab", "sampling_params": LASTING | {"max_new_tokens": n}} for n in (100, 30_000)]
            short, long = (pool.submit(server.http.post, "/generate", json=body) for body in bodies)
            server.wait_for_stats(num_running=2)
            server.process.terminate()
            assert short.result().json()["meta_info"]["completion_tokens"] == 100
            assert long.result().status_code == 503
            assert server.end()[0] == 0
            assert not is_running(engine)


def engine_of(server: RunningServer) -> int | list[bool]:
    """The process id of the engine; whether each lives, where they are threads."""
    if isinstance(server, ServerThread):
        return [engine.is_running for engine in server.engines]
    assert isinstance(server, ServerProcess)
    return served.engine_of(server.process.pid)
