"""The application with real Ray: what happens when one of its processes is killed, and which replicas get requests."""

import concurrent.futures
import itertools
import json
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ray.application import RAY_PYTHON, RunningApplication, running

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not RAY_PYTHON.exists(), reason="needs Ray, which `make test-long` installs beside the rest"),
]

NUM_REPLICAS = 2
NUM_STREAMS = 6
NUM_AFTER = 40


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApplication]:
    with running(tmp_path_factory.mktemp("ray"), 8741, "replicas=2") as app:
        yield app


def body(prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}


class Streams:
    """Streams under way. `ends` has how each ended: its last event, or the name of the client's error."""

    def __init__(self, app: RunningApplication, count: int = NUM_STREAMS, max_tokens: int = 1500) -> None:
        self._app = app
        self._max_tokens = max_tokens
        self._begun = threading.Semaphore(0)
        self._pool = concurrent.futures.ThreadPoolExecutor(count)
        self._ends = [self._pool.submit(self._read, number) for number in range(count)]
        for _ in range(count):
            assert self._begun.acquire(timeout=60)

    @property
    def ends(self) -> list[str]:
        return [end.result() for end in self._ends]

    def _read(self, number: int) -> str:
        asked, last = body(f"stream {number} " * 20, self._max_tokens, stream=True), ""
        try:
            with self._app.http.stream("POST", "/v1/completions", json=asked) as response:
                for line in response.iter_lines():
                    if not last:
                        self._begun.release()
                    if line.startswith("data: ") and line != "data: [DONE]":
                        last = line.removeprefix("data: ")
        except httpx.HTTPError as error:
            return type(error).__name__
        event = json.loads(last)
        return event["error"]["message"] if "error" in event else event["choices"][0]["finish_reason"]


def statuses_after(app: RunningApplication) -> list[int]:
    asked = [body(f"again {number}", 2) for number in range(NUM_AFTER)]
    return [app.http.post("/v1/completions", json=each).status_code for each in asked]


KILLED_ENDS = {  # the streams of a killed replica end as usual, because its server lets them, as with SIGTERM
    "engine": "the replica of this request ended after its answer had begun; send it again",
    "front": "RemoteProtocolError",  # Serve's proxy cannot say more, so the stream is cut before its end
}


@pytest.mark.parametrize(("kind", "num_alive"), [("engine", 2), ("replica", 2), ("front", 1), ("directory", 1)])
def test_a_killed_process_is_replaced_and_nothing_is_left(app: RunningApplication, kind: str, num_alive: int) -> None:
    app.wait_until_all_answer()
    streams = Streams(app)
    killed = app.kill(kind)
    assert statuses_after(app) == [200] * NUM_AFTER
    ends = streams.ends
    broken = KILLED_ENDS.get(kind, "length")
    assert set(ends) <= {"length", broken}
    assert broken in ends
    app.wait_for(kind, num_alive, without=killed)
    app.wait_for("engine", NUM_REPLICAS)
    assert statuses_after(app) == [200] * NUM_AFTER


def test_an_update_loses_nothing(app: RunningApplication) -> None:
    app.wait_until_all_answer()
    before, streams = set(app.pids("engine")), Streams(app, count=16)
    app.process.send_signal(signal.SIGUSR1)  # to one replica: Serve starts everything anew, as for any new argument

    def is_new() -> bool:
        assert statuses_after(app) == [200] * NUM_AFTER
        return len(engines := app.pids("engine")) == 1 and before.isdisjoint(engines)

    app.wait(is_new)
    assert streams.ends == ["length"] * 16
    assert statuses_after(app) == [200] * NUM_AFTER


def test_several_hosts_are_one_replica(tmp_path: Path) -> None:
    with running(tmp_path, 8743, "replicas=1", "tp=2", "hosts=2") as app:
        assert len(app.pids("engine")) == 2
        assert statuses_after(app) == [200] * NUM_AFTER
        killed = app.kill("follower")
        app.wait_for("engine", 2, without=killed)
        assert statuses_after(app) == [200] * NUM_AFTER


def test_waiting_requests_bring_another_replica(tmp_path: Path) -> None:
    with (
        running(tmp_path, 8744, "replicas=1..2", "waiting=1") as app,
        concurrent.futures.ThreadPoolExecutor(32) as pool,
    ):
        asked = itertools.count()

        def work() -> None:
            while len(app.pids("engine")) < 2:
                answer = app.http.post("/v1/completions", json=body(f"many {next(asked)}", 300))
                assert answer.status_code == 200

        working = [pool.submit(work) for _ in range(32)]
        app.wait_for("engine", 2)
        for each in working:
            each.result()
