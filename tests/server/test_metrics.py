"""`/metrics`: its counts agree with what clients saw."""

import asyncio
import concurrent.futures
import math
import socket
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from jsg.engine.child.protocol import CORE_STATS, LOOP_STATS, STATE_STATS
from jsg.errors import EngineDeadError
from jsg.server.telemetry import telemetry
from jsg.server.telemetry.engine_stats import ENGINE_SERIES, EngineStats
from tests.engine.fake_core import VOCAB_SIZE
from tests.server.mixed_run import MixedRun, Seen, quiet
from tests.server.running import RunningServer
from tests.server.scrape import Scrape, scrape, scrape_until
from tests.server.threads import ServerMaker, ServerThread


@pytest.fixture
def after_run(mixed_run: MixedRun) -> tuple[Scrape, Seen]:
    """A server's counters after a mixed run, and what its clients saw."""
    return mixed_run.scraped, mixed_run.seen


class TestTruth:
    def test_prompt_tokens_are_those_that_clients_were_told(self, after_run: tuple[Scrape, Seen]):
        result, seen = after_run
        assert result.get("jsg:prompt_tokens_total") == seen.prompt_tokens + seen.left_prompt_tokens
        assert seen.cached_tokens > 0
        # Those who left were not told; nobody had finished a prompt like theirs, so nothing of it was cached.
        assert result.get("jsg:cached_tokens_total") == seen.cached_tokens

    def test_generated_tokens_are_those_that_clients_were_told(self, after_run: tuple[Scrape, Seen]):
        result, seen = after_run
        generated, discarded = (
            result.get("jsg:generation_tokens_total"),
            result.by("jsg:generation_tokens_discarded_total", "reason"),
        )
        assert set(discarded) == {"client_disconnect"}
        assert generated - discarded["client_disconnect"] == seen.generated_tokens
        assert discarded["client_disconnect"] >= seen.left_generated_tokens  # some were on their way when they left
        assert generated <= result.get("jsg:engine_generated_tokens_total")

    def test_finishes_are_those_that_clients_were_told(self, after_run: tuple[Scrape, Seen]):
        result, seen = after_run
        assert {reason for _, reason in seen.finishes} == {"stop", "length", "abort"}
        for route in ("/v1/completions", "/generate"):
            for reason in ("stop", "length"):
                count = result.get("jsg:requests_finished_total", route=route, reason=reason)
                assert count == seen.finishes.count((route, reason)), (route, reason)
        assert result.by("jsg:requests_aborted_total", "reason") == {
            "abort_request": seen.finishes.count(("/generate", "abort")),
            "client_disconnect": 8,
            "error": 8,
        }

    def test_responses_are_those_that_clients_got(self, after_run: tuple[Scrape, Seen]):
        result, seen = after_run
        for route, status in set(seen.statuses):
            count = result.get("jsg:http_requests_total", route=route, status=status, method="POST")
            assert count == seen.statuses.count((route, status)), (route, status)
        assert result.get("jsg:http_requests_total", route="/abort_request") == 8

    def test_histograms_count_answers_and_tokens(self, after_run: tuple[Scrape, Seen]):
        result, seen = after_run
        num_finished = sum(reason != "abort" for _, reason in seen.finishes)
        for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"):
            assert result.get(f"jsg:{name}_count") == num_finished, name
        num_with_token = len(seen.finishes) + 8  # and those who left after one
        for name in ("time_to_first_token_seconds", "queue_time_seconds", "prefill_time_seconds"):
            assert result.get(f"jsg:{name}_count") == num_with_token, name
        num_gaps = result.get("jsg:generation_tokens_total") - num_with_token
        assert result.get("jsg:inter_token_latency_seconds_count") == num_gaps

    def test_buckets_are_cumulative_and_end_with_the_count(self, after_run: tuple[Scrape, Seen]):
        result, _ = after_run
        for name in [name for name in result.samples if name.endswith("_bucket")]:
            buckets = sorted((float(dict(labels)["le"]), value) for labels, value in result.samples[name].items())
            values = [value for _, value in buckets]
            assert values == sorted(values), name
            assert buckets[-1] == (math.inf, result.get(name.replace("_bucket", "_count"))), name

    def test_gauges_return_to_zero(self, after_run: tuple[Scrape, Seen]):
        result, _ = after_run
        for name in ("answers_open", "requests_running", "requests_waiting", "kv_used_tokens", "kv_usage"):
            assert result.get(f"jsg:{name}") == 0, name
        free, evictable = (result.get("jsg:kv_tokens", state=state) for state in ("free", "evictable"))
        assert free + evictable == result.get("jsg:kv_capacity_tokens")

    def test_the_engine_agrees(self, after_run: tuple[Scrape, Seen]):
        result, _ = after_run
        assert result.get("jsg:engine_prompt_tokens_total") >= result.get("jsg:prompt_tokens_total")
        hit_rate = result.get("jsg:engine_cached_tokens_total") / result.get("jsg:engine_prompt_tokens_total")
        assert result.get("jsg:cache_hit_rate") == pytest.approx(hit_rate)
        assert 0 < hit_rate < 1
        assert result.get("jsg:engine_steps_total") > 0


class TestScrape:
    def test_every_engine_series_is_there(self, http: httpx.Client):
        samples = scrape(http).samples
        assert [s.series.name for s in ENGINE_SERIES if s.series.name not in samples] == []

    def test_the_engine_promises_what_they_need(self):
        keys = {key for one in ENGINE_SERIES for keys in one.keys.values() for key in keys}
        assert keys <= set(CORE_STATS) | set(STATE_STATS) | set(LOOP_STATS)

    def test_both_formats_have_the_same_names(self, http: httpx.Client):
        """Prometheus asks for OpenMetrics first; names must not change with it."""
        text = scrape(http)
        accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
        response = http.get("/metrics", headers={"Accept": accept})
        assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert response.text.endswith("# EOF\n")
        names = {sample.name for family in openmetrics_families(response.text) for sample in family.samples}
        assert names == set(text.samples)
        assert {name for name in names if not name.startswith("jsg:")} == {"process_start_time_seconds"}

    @pytest.mark.parametrize(
        "accept",
        [
            "",
            "*/*",
            "text/plain",
            "application/openmetrics-text;q=0",
            "application/openmetrics-text;q=x",
            ";;,=",
            "a/b",
        ],
    )
    def test_everybody_else_gets_text(self, http: httpx.Client, accept: str):
        response = http.get("/metrics", headers={"Accept": accept})
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert response.text.startswith("# HELP jsg:")

    def test_a_path_that_is_not_ours_and_a_strange_method_are_one_label(self, http: httpx.Client):
        for path in ("/nothing/1", "/nothing/2"):
            assert http.get(path).status_code == 404
        http.request("BREW", "/generate")
        result = scrape(http)
        routes = {dict(labels)["route"] for labels in result.samples["jsg:http_requests_total"]}
        assert {route for route in routes if "nothing" in route} == set()
        assert result.get("jsg:http_requests_total", route="other", status="404") >= 2
        assert result.get("jsg:http_requests_total", route="/generate", method="other") >= 1

    def test_what_a_connection_refuses_counts_once_its_head_was_read(self, http: httpx.Client):
        def statuses(result: Scrape) -> dict[str, float]:
            return result.by("jsg:http_requests_total", "status")

        before = statuses(scrape(http))
        address = (http.base_url.host, http.base_url.port)
        body_is_bad = b"POST /generate HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n"
        for sent in (b"no HTTP\r\n\r\n", body_is_bad):
            with socket.create_connection(address, 10) as connection:
                connection.sendall(sent)
                assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
        due = before | {"499": before.get("499", 0) + 1}
        scrape_until(http, lambda result: statuses(result) | {"200": 0} == due | {"200": 0})  # scrapes are 200

    def test_every_path_of_ours_has_its_own_label(self, http: httpx.Client):
        paths = [path for path in http.get("/openapi.json").json()["paths"] if "{" not in path]
        before = scrape(http)
        for path in paths:
            http.request("BREW", path)
        after = scrape(http)
        for path in paths:
            assert after.get("jsg:http_requests_total", route=path, method="other") > 0, path
        assert after.get("jsg:http_requests_total", route="/openapi.json", status="200") >= 1
        others = [result.by("jsg:http_requests_total", "route").get("other", 0) for result in (before, after)]
        assert others[0] == others[1]

    def test_a_parameter_in_a_path_is_no_label(self, http: httpx.Client):
        for name in ("fake", "another"):
            http.get(f"/v1/models/{name}")
        result = scrape(http)
        routes = [dict(labels)["route"] for labels in result.samples["jsg:http_requests_total"]]
        assert any(route.startswith("/v1/models/{") for route in routes)
        assert not any("another" in route or "fake" in route for route in routes)

    def test_the_loop_is_watched(self, http: httpx.Client):
        scrape_until(http, lambda result: result.get("jsg:event_loop_lag_seconds_count") > 2)

    def test_get_is_the_only_method(self, http: httpx.Client):
        assert http.post("/metrics").status_code == 405


def test_answers_soon_after_each_other_are_one(server: ServerThread, monkeypatch):
    monkeypatch.setattr(telemetry, "SCRAPE_AGE_S", math.inf)
    first, before = server.http.get("/metrics").text, scrape(server.http)
    server.http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 1}})
    assert server.http.get("/metrics").text != first  # that of `scrape`, which asked for a new one
    assert server.http.get("/metrics").text == server.http.get("/metrics").text
    after = scrape(server.http)
    assert after.get("jsg:prompt_tokens_total") > before.get("jsg:prompt_tokens_total")
    monkeypatch.setattr(telemetry, "SCRAPE_AGE_S", 0)
    assert server.http.get("/metrics").text != server.http.get("/metrics").text  # each counts the one before


def test_metrics_may_be_open(make_server: ServerMaker):
    with make_server(server={"api_key": ["k1", "k2"], "open_metrics": True}) as server:
        assert scrape(server.http).get("jsg:engine_up") == 1
        assert server.http.get("/metrics/").status_code == 401
        assert server.http.get("/v1/models").status_code == 401
        described = server.http.get("/openapi.json", headers={"Authorization": "Bearer k2"}).json()["paths"]
        assert "security" not in described["/metrics"]["get"] and "security" in described["/v1/models"]["get"]


def test_metrics_need_a_key(make_server: ServerMaker):
    with make_server(server={"api_key": ["k1", "k2"]}) as server:
        assert server.http.get("/metrics").status_code == 401
        result = scrape(server.http, headers={"Authorization": "Bearer k2"})
        assert result.get("jsg:http_requests_total", route="/metrics", status="401") == 1


def test_a_scrape_does_not_wait_for_an_engine_that_stands_still(server: ServerThread):
    before = scrape(server.http)
    with server.engines[0].frozen():
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = [*pool.map(lambda _: scrape(server.http), range(8))]  # before the engine goes on
        for result in results:
            assert result.get("jsg:engine_steps_total") == before.get("jsg:engine_steps_total")
            assert result.get("jsg:engine_stats_age_seconds") >= 0.9
    scrape_until(server.http, lambda result: result.get("jsg:engine_stats_age_seconds") < 0.9)


async def test_scrapes_share_one_question_and_the_last_answer_is_kept():
    class Engine:
        is_alive, is_stalled = True, False
        info = SimpleNamespace(max_total_tokens=100, page_size=1)

        def __init__(self) -> None:
            self.num_asked = 0
            self.answered = asyncio.Event()
            self.engines = (self,)

        async def stats(self) -> dict[str, int]:
            self.num_asked += 1
            await self.answered.wait()
            if self.num_asked > 1:
                raise EngineDeadError("x")
            return {"num_running": 5}

    engine, now = Engine(), 10.0
    stats = EngineStats(engine, dict, now=lambda: now)  # pyright: ignore[reportArgumentType]
    for _ in range(2):
        await asyncio.gather(*(stats.refresh(timeout_s=0.01) for _ in range(5)))
    assert engine.num_asked == 1
    assert "jsg:requests_running" not in {family.series.name for family in stats.families()}
    engine.answered.set()
    await stats.refresh()
    now = 13.0
    await stats.refresh()
    assert engine.num_asked == 2
    values = {family.series.name: [*family.samples.values()] for family in stats.families()}
    assert values["jsg:requests_running"] == [(5,)] and values["jsg:engine_stats_age_seconds"] == [(3,)]


async def test_the_use_of_several_pools_is_that_of_each_by_its_size():
    """An engine may be full although many tokens are free: of layers with a window."""

    def engine(num_free: int, usage: float) -> SimpleNamespace:
        async def stats() -> dict[str, float]:
            pool = {"num_free_tokens": num_free, "num_evictable_tokens": 40, "num_protected_tokens": 10}
            return {**pool, "num_uncached_tokens": 0, "kv_usage": usage}

        info = SimpleNamespace(max_total_tokens=num_free + 50, page_size=1)
        return SimpleNamespace(is_alive=True, is_stalled=False, info=info, stats=stats)

    fleet = SimpleNamespace(is_alive=True, is_stalled=False, engines=(engine(50, 1.0), engine(250, 0.2)), routed={})
    stats = EngineStats(fleet, dict)  # pyright: ignore[reportArgumentType]
    await stats.refresh()
    values = {family.series.name: [*family.samples.values()] for family in stats.families()}
    assert values["jsg:kv_usage"] == [(pytest.approx(0.4),)] and values["jsg:kv_used_tokens"] == [(20,)]


def test_requests_under_way_are_seen(server: RunningServer, http: httpx.Client):
    with server.holding(3):
        result = scrape(http)
        assert (result.get("jsg:answers_open"), result.get("jsg:requests_running")) == (3, 3)
        assert result.get("jsg:kv_used_tokens") > 0
    scrape_until(http, quiet)


def test_a_list_that_the_engine_refuses_counts_as_refused(server: RunningServer):
    def aborted() -> dict[str, float]:
        return scrape_until(server.http, quiet).by("jsg:requests_aborted_total", "reason")

    before = aborted()
    assert server.http.post("/generate", json={"input_ids": [[1], [VOCAB_SIZE]]}).status_code == 400
    assert {reason for reason, count in aborted().items() if count > before.get(reason, 0)} <= {"refused"}
