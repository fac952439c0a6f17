"""`--dp-size` over HTTP: what clients, probes, scrapers and admins see of several engines with scripted cores."""

import contextlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from jsg.errors import EngineDeadError
from jsg.server import run
from tests.server.running import ProcessMaker, RunningServer, check_discreet, is_running, wait_until
from tests.server.scrape import scrape, scrape_until
from tests.server.threads import ServerMaker, ServerThread

SIZE = 2
PREFIX = list(range(1, 129))


@pytest.fixture(scope="module")
def two(make_server: ServerMaker) -> Iterator[ServerThread]:
    with make_server(server={"dp_size": SIZE}) as made:
        yield made


@pytest.fixture
def server(two: ServerThread) -> ServerThread:
    two.reset()
    return two


@pytest.fixture
def doomed(make_server: ServerMaker) -> Iterator[ServerThread]:
    """One whose engines may be killed."""
    with make_server(server={"dp_size": SIZE}) as made:
        yield made


def states(server: RunningServer) -> list[dict[str, Any]]:
    return server.http.get("/get_server_info").json()["internal_states"]


def body(ids: list[int], num_tokens: int = 4, **fields: Any) -> dict[str, Any]:
    return {"input_ids": ids, "sampling_params": {"max_new_tokens": num_tokens}, **fields}


def idle(server: RunningServer) -> None:
    wait_until(lambda: all(state["num_running"] == 0 for state in states(server)))


def cached_tokens(server: RunningServer, engine: int) -> int:
    shown = server.http.get("/debug/radix", params={"engine": engine}).json()
    assert shown["engine"] == engine
    return sum(node[2] for node in shown["nodes"])


@contextlib.contextmanager
def streaming(server: RunningServer, ids: list[int]) -> Iterator[Iterator[str]]:
    """A long answer of which the first event has been read."""
    with server.http.stream("POST", "/generate", json=body(ids, 800, stream=True)) as response:
        lines = (line for line in response.iter_lines() if line)
        next(lines)
        yield lines


class TestShownTogether:
    def test_info_has_each_engine(self, server: RunningServer):
        info = server.http.get("/get_server_info").json()
        assert info["dp_size"] == SIZE
        assert [(state["engine"], state["state"]) for state in info["internal_states"]] == [(0, "ok"), (1, "ok")]
        one = info["model_info"]["max_total_tokens"] // SIZE
        assert info["model_info"]["max_request_tokens"] <= one
        assert server.http.get("/health").json() == {"status": "ok"}

    def test_requests_are_shared_out(self, server: RunningServer):
        with streaming(server, [1, 200]), streaming(server, [2, 201]):
            assert [state["num_running"] for state in states(server)] == [1, 1]
            answer = server.http.post("/generate", json=body([3, 202])).json()
            assert answer["output_ids"] == [3, 202] * 2
        assert [row["dp_rank"] for row in server.http.get("/get_load").json()] == [0, 1]

    def test_answers_to_one_prompt_share_its_prefix(self, server: RunningServer):
        before = [state["num_added"] for state in states(server)]
        prompt = body([300, *PREFIX]) | {"sampling_params": {"max_new_tokens": 4, "n": 4}}
        answers = server.http.post("/generate", json=prompt).json()
        assert len(answers) == 4
        assert sorted(state["num_added"] - n for state, n in zip(states(server), before, strict=True)) == [0, 4]

    def test_metrics_are_sums_with_each_engine_beside_them(self, server: RunningServer):
        for seed in range(2):
            for _ in range(2):
                server.http.post("/generate", json=body([seed + 1, 100 + seed]))
        idle(server)
        result, told = scrape(server.http), states(server)
        for name, key in (("prompt_tokens", "prompt_tokens"), ("generated_tokens", "generated_tokens")):
            total = sum(state[key] for state in told)
            assert result.get(f"jsg:engine_{name}_total") == total > 0
            assert result.by(f"jsg:dp_{name}_total", "engine") == {str(i): state[key] for i, state in enumerate(told)}
        hits = sum(s["cached_tokens"] for s in told) / sum(s["prompt_tokens"] for s in told)
        assert result.get("jsg:cache_hit_rate") == pytest.approx(hits)
        assert (result.get("jsg:engines"), result.get("jsg:engines_up"), result.get("jsg:engine_up")) == (2, 2, 1)
        assert result.by("jsg:dp_up", "engine") == {"0": 1, "1": 1}
        routed = sum(result.by("jsg:dp_routed_total", "reason").values())
        assert routed == sum(state["num_added"] for state in told)
        with streaming(server, [1, 2]), streaming(server, [3, 4]):
            result = scrape(server.http)
            assert result.get("jsg:requests_running") == 2
            assert result.by("jsg:dp_requests_running", "engine") == {"0": 1, "1": 1}
        scrape_until(server.http, lambda result: result.get("jsg:requests_running") == 0)

    def test_caches(self, server: RunningServer):
        with streaming(server, [1, 2]) as first, streaming(server, [3, 4]) as second:  # so that each engine has one
            for lines in (first, second):
                list(lines)
        assert [cached_tokens(server, engine) > 0 for engine in range(2)] == [True, True]
        assert server.http.post("/flush_cache").status_code == 200
        assert [cached_tokens(server, engine) for engine in range(2)] == [0, 0]

    def test_aborting_by_name_and_all(self, server: RunningServer):
        with contextlib.ExitStack() as clients:
            for seed in range(4):
                sent = server.send("/generate", body([seed, 7], 900, rid=f"r{seed}"))
                clients.enter_context(contextlib.closing(sent))
            wait_until(lambda: [state["num_running"] for state in states(server)] == [2, 2])
            assert server.http.post("/abort_request", json={"rid": "r3"}).json()["aborted"] == 1
            assert server.http.post("/abort_request", json={"abort_all": True}).json()["aborted"] == 3
            idle(server)

    def test_programs_run_on_it(self, server: RunningServer):
        chosen = server.http.post("/select", json={"prompt": "ab", "choices": ["a", "bc"]})
        assert chosen.status_code == 200, chosen.text
        assert server.http.get("/health_generate").status_code == 200


class TestDeath:
    def test_one_of_two(self, doomed: ServerThread, caplog, monkeypatch: pytest.MonkeyPatch):
        """Its streams end with an error, the others go on, probes and metrics say so; then the last one dies."""
        monkeypatch.setattr(run, "DEATH_NOTICE_S", 5.0)  # so that a busy machine has the time to see it
        server = doomed
        for seed in range(4):
            server.http.post("/generate", json=body([seed + 1, 200 + seed]))
        before = scrape(server.http)
        with streaming(server, [1, 2]) as first, streaming(server, [3, 4]) as second:
            running = [state["num_running"] for state in states(server)]
            assert running == [1, 1]
            server.engines[0].kill()
            last = {lines: [*lines][-2:] for lines in (first, second)}
        errors = [line for lines in last.values() for line in lines if '"error"' in line]
        (error,) = (json.loads(line.removeprefix("data: "))["error"] for line in errors)
        assert "send it again" in error["message"]
        check_discreet(json.dumps(error))
        for path in ("/health", "/ready"):
            assert (server.http.get(path).status_code, server.http.get(path).json()) == (200, {"status": "degraded"})
        assert server.http.post("/generate", json=body([9, 8])).json()["output_ids"] == [9, 8, 9, 8]
        self.check_told(server, before)
        assert "engine 0 of 2" in caplog.text

        server.engines[1].kill()
        wait_until(lambda: server.http.get("/health").status_code == 503)
        assert server.http.get("/health").json() == {"status": "dead"}
        assert server.http.get("/get_server_info").status_code == 503
        assert isinstance(server.join(), EngineDeadError)

    def check_told(self, server: RunningServer, before: Any) -> None:
        told = states(server)
        assert (told[0], told[1]["state"]) == ({"engine": 0, "state": "dead"}, "ok")
        assert [row["dp_rank"] for row in server.http.get("/get_load").json()] == [1]
        after = scrape(server.http)
        assert (after.get("jsg:engines"), after.get("jsg:engines_up"), after.get("jsg:engine_up")) == (2, 1, 1)
        assert after.state == "ready", "one engine still works"
        assert [after.get("jsg:dp_up", engine=number) for number in "01"] == [0, 1]
        assert after.get("jsg:kv_capacity_tokens") == before.get("jsg:kv_capacity_tokens") / 2
        name = "jsg:engine_prompt_tokens_total"
        assert after.get(name) > before.get(name), "a total never falls"
        assert server.http.get("/debug/radix?engine=0").status_code == 503
        assert cached_tokens(server, 1) > 0

    def test_what_has_told_nothing_goes_over(self, make_server: ServerMaker):
        engine = {"max_running_requests": 1}
        with make_server(server={"dp_size": SIZE}, engine=engine) as server, contextlib.ExitStack() as clients:
            for ids in ([1, 2], [3, 4]):
                clients.enter_context(contextlib.closing(server.send("/generate", body(ids, 400, stream=True))))
            wait_until(lambda: [state["num_running"] for state in states(server)] == [1, 1])
            waiting = [server.send("/generate", body([20 + seed, 5])) for seed in range(6)]
            wait_until(lambda: sum(state["num_waiting"] for state in states(server)) == 6)
            server.engines[1].kill()
            for seed, connection in enumerate(waiting):
                with contextlib.closing(connection):
                    response = connection.getresponse()
                    assert response.status == 200
                    assert json.loads(response.read())["output_ids"] == [20 + seed, 5, 20 + seed, 5]

    def test_a_stalled_one_gets_nothing_new(self, doomed: ServerThread):
        server = doomed
        with server.engines[0].frozen():
            wait_until(lambda: server.http.get("/health").json() == {"status": "degraded"})
            for seed in range(4):
                assert server.http.post("/generate", json=body([seed, 6])).status_code == 200
            assert states(server)[0] == {"engine": 0, "state": "stalled"}
            result = scrape(server.http)
            assert result.get("jsg:engines_up") == 1
            assert result.get("jsg:engine_stats_age_seconds") < 60, "who has told nothing yet has no age"
        wait_until(lambda: server.http.get("/health").json() == {"status": "ok"})

    @pytest.mark.slow  # `test_shutdown.py` does it with one process
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_processes_end_with_the_front(self, make_process: ProcessMaker, number: int):
        """In order; and where it was told twice, or killed, at once."""
        with make_process(server={"dp_size": SIZE, "shutdown_timeout": 60}) as server:
            pids = [state["pid"] for state in states(server)]
            with contextlib.closing(server.send("/generate", body([1], 1000))):
                wait_until(lambda: sum(state["num_running"] for state in states(server)) == 1)
                server.process.terminate()
                wait_until(lambda: server.http.get("/ready").status_code == 503)
                server.process.send_signal(number)
                assert server.end()[0] == (128 + number if number == signal.SIGTERM else -number)
            wait_until(lambda: not any(map(is_running, pids)))


def test_one_engine_shows_nothing_of_this(shared_server: RunningServer):
    assert "engine" not in states(shared_server)[0]
    assert "jsg:dp_" not in shared_server.http.get("/metrics").text
