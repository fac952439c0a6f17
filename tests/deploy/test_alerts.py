"""What the alerts say of a start, of restarts, deaths, stalls and errors: by promtool, and with a real Prometheus."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml

from jsg.free_ports import free_ports
from tests.deploy.promql import tokens_of
from tests.deploy.test_grafana import PROMETHEUS, RULES
from tests.server.running import ROOT, running, wait_until

FOLDER = ROOT / "deploy" / "prometheus"
STATES = ("loading", "ready", "draining", "stalled", "ended")
SCRAPE_S = 10
PER_MINUTE = 60 // SCRAPE_S
PROGRAMS = 40

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")


@dataclasses.dataclass
class History:
    """What scrapes of one server gave, each `SCRAPE_S` after the one before; None where it did not answer."""

    instance: str = "a"
    scrapes: list[dict[str, float] | None] = dataclasses.field(default_factory=list)
    _counts: dict[str, float] = dataclasses.field(default_factory=dict)
    _started_s: float = 0
    _is_down: bool = True
    _pending: int = PROGRAMS

    def down(self, minutes: float) -> Self:
        self.scrapes += [None] * round(minutes * PER_MINUTE)
        self._is_down = True
        return self

    def restart(self) -> Self:
        """As after `down`, but between two scrapes."""
        self._is_down = True
        return self

    def up(
        self, state: str, minutes: float, *, refused: int = 0, failed: int = 0, lowered: int = 0, engines: int = 2
    ) -> Self:
        """Answers in this state, each scrape after so many answers with 503, with 500, and traced programs.

        A server that is ready traces the programs that it has left, one with each scrape.
        """
        if self._is_down:
            self._counts, self._is_down, self._pending = {}, False, PROGRAMS // 2
            self._started_s = 1000 + len(self.scrapes) * SCRAPE_S
        for _ in range(round(minutes * PER_MINUTE)):
            done = min(self._pending, 1) if state == "ready" else 0
            self._pending -= done
            ready = state in ("ready", "draining")
            for route, status, count in (
                ("/health", 200 if ready else 503, 5),
                ("/ready", 200 if state == "ready" else 503, 5),
                ("/metrics", 200, 1),
                ("/v1/completions", 200, 40 * ready),
                ("/v1/completions", 503, refused),
                ("/v1/completions", 500, failed),
            ):
                self._count(f'jsg:http_requests_total{{route="{route}", method="POST", status="{status}"}}', count)
            values = {f'jsg:state{{state="{each}"}}': float(each == state) for each in STATES}
            values |= {"process_start_time_seconds": self._started_s} | self._counts
            if state != "loading":
                self._counts.setdefault("jsg:programs_lowered_total", PROGRAMS // 2)
                self._count("jsg:programs_lowered_total", done + lowered)
                values |= {"jsg:engines": 2, "jsg:engines_up": engines, "jsg:programs_pending": self._pending}
                values |= self._counts
            self.scrapes.append(values)
        return self

    def _count(self, name: str, count: float) -> None:
        if count or name in self._counts:
            self._counts[name] = self._counts.get(name, 0) + count

    def series(self) -> Iterator[dict[str, str]]:
        """As promtool takes them. A scrape that fails ends each series, as Prometheus does it."""
        names = {name: None for values in self.scrapes for name in values or ()}
        for name in ("up", *names):
            written, is_there = [], False
            for values in self.scrapes:
                value = float(values is not None) if name == "up" else (values or {}).get(name)
                written.append(("stale" if is_there else "_") if value is None else f"{value:g}")
                is_there = value is not None
            labels = f'job="jsg", instance="{self.instance}"'
            full = name.replace("{", f"{{{labels}, ") if "{" in name else f"{name}{{{labels}}}"
            yield {"series": full, "values": " ".join(written)}


@dataclasses.dataclass(frozen=True)
class Scenario:
    """What servers do, and which alerts fire meanwhile.

    Attributes:
        servers: Their histories.
        fires: An alert → the first and the last minute in which it fires for server a. No other ever fires.
    """

    servers: list[History]
    fires: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)


def started(instance: str = "a") -> History:
    """A server that became ready long ago."""
    return History(instance).up("loading", 1).up("ready", 30)


SCENARIOS = {
    "a start of 15 minutes, while clients ask": Scenario(
        [History().down(1).up("loading", 15, refused=100).up("ready", 40)]
    ),
    "the start of a server that traces all before it is ready": Scenario([History().up("loading", 9).up("ready", 40)]),
    "a rolling restart": Scenario(
        [
            started("a").up("draining", 0.5).down(0.5).up("loading", 6).up("ready", 40),
            started("b").up("ready", 8).up("draining", 0.5).down(0.5).up("loading", 6).up("ready", 32),
        ]
    ),
    "a rolling restart without a delay, while clients ask": Scenario(
        [
            started("a").up("draining", 0.5, refused=100).restart().up("loading", 6, refused=100).up("ready", 40),
            started("b").up("ready", 8).restart().up("ready", 40),  # which nobody sees but by the start
        ]
    ),
    "two rolling restarts within an hour": Scenario(
        [started().up("draining", 1).up("ready", 10).restart().up("ready", 10).restart().up("ready", 60)]
    ),
    "a death": Scenario([started().down(20).up("loading", 3).up("ready", 20)], {"JsgEngineDown": (33, 50)}),
    "a death that is noticed": Scenario([started().up("ended", 1).down(20)], {"JsgEngineDown": (33, 52)}),
    "a death, and a start that brings it back": Scenario([started().down(0.5).up("loading", 15).up("ready", 20)]),
    "deaths without end while it loads": Scenario(
        [
            History()
            .up("loading", 7)
            .down(0.5)
            .up("loading", 7)
            .down(0.5)
            .up("loading", 7)
            .down(0.5)
            .up("loading", 17.5)
        ],
        {"JsgNotReady": (20, 40), "JsgRestarts": (23, 40)},
    ),
    "deaths again and again in service": Scenario(
        [started().down(0.5).up("ready", 6).down(0.5).up("ready", 6).down(0.5).up("ready", 15)],
        {"JsgRestarts": (45, 58)},
    ),
    "a load that hangs": Scenario([History().up("loading", 40)], {"JsgNotReady": (20, 40)}),
    "a stall": Scenario([started().up("stalled", 10).up("ready", 20)], {"JsgEngineDown": (33, 40)}),
    "a short stall": Scenario([started().up("stalled", 1).up("ready", 20)]),
    "one engine of two is lost": Scenario([started().up("ready", 30, engines=1)], {"JsgEngineLost": (33, 61)}),
    "server errors": Scenario([started().up("ready", 15, failed=10).up("ready", 20)], {"JsgServerErrors": (37, 49)}),
    "requests that find no room": Scenario([started().up("ready", 20, refused=10)], {"JsgServerErrors": (37, 51)}),
    "few errors": Scenario([started().up("ready", 30, failed=1)]),
    "a compile in service": Scenario(
        [started().up("ready", 0.17, lowered=1).up("ready", 30)], {"JsgCompilesInService": (31, 40)}
    ),
}


def judged(scenario: Scenario) -> dict[str, Any]:
    """The scenario as a test of promtool: each alert in each minute, 5 s after a scrape."""
    num_minutes = len(scenario.servers[0].scrapes) // PER_MINUTE
    tests = []
    for rule in RULES:
        first, last = scenario.fires.get(rule["alert"], (1, 0))
        summary = rule["annotations"]["summary"].replace("{{ $labels.instance }}", "a")
        labels = {"job": "jsg", "instance": "a", **rule["labels"]}
        firing = {"exp_labels": labels, "exp_annotations": {"summary": summary}}
        tests += [
            {
                "eval_time": f"{minute}m",
                "alertname": rule["alert"],
                "exp_alerts": [firing] * (first <= minute <= last),
            }
            for minute in range(1, num_minutes)
        ]
    series = [each for server in scenario.servers for each in server.series()]
    return {"interval": f"{SCRAPE_S}s", "input_series": series, "alert_rule_test": tests}


@needs_promtool
@pytest.mark.long
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_fires_and_what_does_not(name: str, tmp_path: Path):
    scenario = SCENARIOS[name]
    unknown = set(scenario.fires) - {rule["alert"] for rule in RULES}
    assert not unknown
    test = {"rule_files": [str(FOLDER / "jsg.rules.yml")], "evaluation_interval": f"{SCRAPE_S}s"}
    (tmp_path / "test.yml").write_text(yaml.safe_dump(test | {"tests": [judged(scenario)]}))
    done = subprocess.run(
        ["promtool", "test", "rules", str(tmp_path / "test.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[:3000] + done.stderr[:3000]


@needs_promtool
@pytest.mark.long
def test_promtool_takes_the_rules_and_the_configuration(tmp_path: Path):
    for name in ("jsg.rules.yml", "prometheus.yml"):
        shutil.copy(FOLDER / name, tmp_path)
    subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], check=True, timeout=60)


@needs_prometheus
@pytest.mark.long
def test_a_real_prometheus_finds_each_series_of_each_rule_and_no_alert(compile_cache_dir: str, tmp_path: Path):
    """The configuration of `deploy`, with a shorter interval, against `jsg serve`."""
    options = ["--port", "0", "--compilation-cache-dir", compile_cache_dir]
    with running(["-m", "jsg.cli", "serve", "tiny", *options]) as server, prometheus(server.http, tmp_path) as api:
        for number in range(20):
            body = {"model": "tiny", "prompt": f"{number}", "max_tokens": 4}
            assert server.http.post("/v1/completions", json=body).status_code == 200
            assert server.http.get("/ready").status_code == 200
        names = {token.text for rule in RULES for token in tokens_of(rule["expr"]) if token.kind == "name"}
        names = {name for name in names if name == "up" or name.startswith(("jsg:", "process_"))}
        assert len(names) == 10
        wait_until(lambda: not [name for name in names if not found(api, name)], 30)
        groups = api.get("/rules").json()["data"]["groups"]
        wait_until(lambda: all(rule["health"] == "ok" for group in rules(api) for rule in group["rules"]), 30)
        assert [rule["name"] for group in groups for rule in group["rules"]] == [rule["alert"] for rule in RULES]
        assert api.get("/alerts").json()["data"]["alerts"] == []
        assert {each["metric"]["state"]: each["value"][1] for each in found(api, "jsg:state")} == {
            state: str(int(state == "ready")) for state in STATES
        }


def found(api: httpx.Client, query: str) -> list[dict[str, Any]]:
    return api.get("/query", params={"query": query}).json()["data"]["result"]


def rules(api: httpx.Client) -> list[dict[str, Any]]:
    return api.get("/rules").json()["data"]["groups"]


@contextlib.contextmanager
def prometheus(server: httpx.Client, directory: Path) -> Iterator[httpx.Client]:
    """Prometheus' API, once it has scraped the server."""
    [job] = PROMETHEUS["scrape_configs"]
    job = job | {"static_configs": [{"targets": [f"{server.base_url.host}:{server.base_url.port}"]}]}
    times = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config = PROMETHEUS | {"global": times, "scrape_configs": [job]}
    (directory / "prometheus.yml").write_text(json.dumps(config))
    shutil.copy(FOLDER / "jsg.rules.yml", directory)
    address = f"127.0.0.1:{free_ports()}"
    command = ["prometheus", f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'db'}"]
    command.append(f"--web.listen-address={address}")
    with (directory / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            with httpx.Client(base_url=f"http://{address}/api/v1", timeout=20) as api:
                wait_until(lambda: is_up(api), 30)
                yield api
        finally:
            process.terminate()


def is_up(api: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        answer = api.get("/query", params={"query": 'up{job="jsg"} == 1'})
        return answer.status_code == 200 and bool(answer.json()["data"]["result"])
    return False
