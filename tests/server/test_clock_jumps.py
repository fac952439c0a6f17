"""A wall clock that jumps by a day, to and fro, while a server runs: nothing expires or waits because of it."""

import itertools
import json
import time
from pathlib import Path

import pytest

from tests.server.battery import VALID
from tests.server.running import events_of, wait_until
from tests.server.threads import ServerMaker

DAY_S = 86_400
JUMPS_S = (0, DAY_S, -DAY_S, 30 * DAY_S, -365 * DAY_S)


@pytest.fixture
def jumps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The wall clock jumps each time that it is read; the times that it gave."""
    given: list[float] = []
    offsets = itertools.cycle(JUMPS_S)
    started_s, started = time.time(), time.monotonic()

    def now() -> float:
        given.append(started_s + time.monotonic() - started + next(offsets))
        return given[-1]

    monkeypatch.setattr(time, "time", now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now() * 1e9))
    return given


def test_a_server_goes_on(make_server: ServerMaker, tmp_path: Path, jumps: list[float]):
    """Stored responses stay, limits by key and time neither open nor close, and whatever is timed is not negative."""
    log = tmp_path / "log"
    with make_server(engine={"queue_timeout": 60.0}, server={"max_requests_per_key": 2}, request_log=log) as server:
        ids = []
        for path, body in VALID.items():
            response = server.http.post(path, json=body)
            assert response.status_code == 200, response.text
        for _ in JUMPS_S:
            ids.append(server.http.post("/v1/responses", json=VALID["/v1/responses"]).json()["id"])
            with server.http.stream("POST", "/generate", json={"text": "ab", "stream": True}) as stream:
                assert events_of(stream)[-1]["meta_info"]["finish_reason"]["type"] == "length"
        for name in ids:
            assert server.http.get(f"/v1/responses/{name}").status_code == 200
            following = VALID["/v1/responses"] | {"previous_response_id": name}
            assert server.http.post("/v1/responses", json=following).status_code == 200
        with server.holding(2):
            refused = server.http.post("/generate", json=VALID["/generate"])
            assert refused.status_code == 429 and 1 <= int(refused.headers["Retry-After"]) <= 60
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/health_generate").status_code == 200
        wait_until(lambda: len(log.read_text().splitlines()) > len(JUMPS_S))
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        assert all(0 <= line["e2e_s"] < DAY_S / 24 for line in lines)
        times = [sample for sample in server.http.get("/metrics").text.splitlines() if "seconds_sum" in sample]
        assert times
        assert all(0 <= float(sample.split()[-1]) < DAY_S for sample in times)
    assert len(jumps) > 2 * len(JUMPS_S), "the server reads this clock"
