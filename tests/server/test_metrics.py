"""`/metrics`: what it counts is what clients saw."""

import asyncio
import concurrent.futures
import contextlib
import json
import math
import os
import signal
import socket
import time
from collections.abc import Iterator
from types import SimpleNamespace

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from jsg.config import ServerConfig
from jsg.engine.protocol import CORE_STATS, LOOP_STATS
from jsg.errors import EngineDeadError, FirstTokenTimeoutError, JsgError, QueueTimeoutError, ShuttingDownError
from jsg.processing.answer import AnswerDelta, Prompt
from jsg.server.caller import ApiCall, Caller
from jsg.server.telemetry.aliases import ALIASES
from jsg.server.telemetry.engine_stats import ENGINE_SERIES, EngineStats
from jsg.server.telemetry.metrics import RATE_WINDOW_S, Metrics
from jsg.server.telemetry.observer import ABORT_REASONS, abort_reason
from jsg.server.telemetry.telemetry import Telemetry
from jsg.types import FinishReason, FinishType, SamplingParams
from tests.engine.fake_core import FAILING_TOKEN, VOCAB_SIZE
from tests.server.conftest import RunningServer, ServerMaker, events_of
from tests.server.scrape import Scrape, scrape, scrape_until

MAX_DELTA_S = 3e-6


def quiet(result: Scrape) -> bool:
    """Nothing is under way, in the front and in the engine."""
    return all(result.get(name) == 0 for name in ("jsg:answers_open", "jsg:requests_running", "jsg:requests_waiting"))


class Seen:
    """What the clients of a run were told."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.finishes: list[tuple[str, str]] = []  # of each answer: route and finish reason
        self.left_prompt_tokens = 0  # of requests that the client left after a token
        self.left_generated_tokens = 0
        self.statuses: list[tuple[str, str]] = []  # of each response: route and status

    def add(self, *others: "Seen") -> None:
        for other in others:
            for name, value in vars(other).items():
                setattr(self, name, getattr(self, name) + value)


class Client:
    """Talks to a server and remembers what it was told."""

    def __init__(self, http: httpx.Client) -> None:
        self.http = http

    def completion(self, prompt: str, *, n: int, max_tokens: int, stream: bool, stop: str | None = None) -> Seen:
        seen = Seen()
        body = {"prompt": prompt, "n": n, "max_tokens": max_tokens, "stream": stream, "stop": stop}
        if stream:
            body |= {"stream_options": {"include_usage": True}}
            with self.http.stream("POST", "/v1/completions", json=body) as response:
                events = events_of(response)
            choices = [choice for event in events for choice in event["choices"]]
            usage = events[-1]["usage"]
        else:
            response = self.http.post("/v1/completions", json=body)
            choices, usage = response.json()["choices"], response.json()["usage"]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert len(reasons) == n
        seen.finishes = [("/v1/completions", reason) for reason in reasons]
        seen.statuses = [("/v1/completions", str(response.status_code))]
        seen.prompt_tokens = usage["prompt_tokens"]
        seen.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
        seen.generated_tokens = usage["completion_tokens"]
        return seen

    def generate(self, prompt: list[int], *, stream: bool, abort_after: int | None = None) -> Seen:
        """Native; with `abort_after` its client aborts it when it has seen so many tokens, and reads to the end."""
        rid = "-".join(map(str, prompt))
        body = {"input_ids": prompt, "rid": rid, "stream": stream, "sampling_params": {"max_new_tokens": 30}}
        if abort_after is not None:
            body["sampling_params"] = {"max_new_tokens": 900}
        if not stream:
            response = self.http.post("/generate", json=body)
            return self._native(response.json(), response)
        last = {}
        with self.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                last = json.loads(line.removeprefix("data: "))
                if abort_after is not None and last["meta_info"]["completion_tokens"] >= abort_after:
                    abort_after = None
                    assert httpx.post(f"{self.http.base_url}/abort_request", json={"rid": rid}).status_code == 200
        return self._native(last, response)

    def leave(self, prompt: list[int], *, after: int) -> Seen:
        """Leaves when it has seen so many tokens."""
        body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": 900}}
        seen = Seen()
        with self.http.stream("POST", "/generate", json=body) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    seen.left_generated_tokens = json.loads(line[6:])["meta_info"]["completion_tokens"]
                if seen.left_generated_tokens >= after:
                    break
        seen.left_prompt_tokens = len(prompt)
        seen.statuses = [("/generate", "200")]
        return seen

    def fail(self) -> Seen:
        """One that the engine fails, and one that is refused before that."""
        seen = Seen()
        for body in ({"input_ids": [FAILING_TOKEN, 1]}, {"nonsense": 1}):
            response = self.http.post("/generate", json=body)
            seen.statuses.append(("/generate", str(response.status_code)))
        return seen

    def _native(self, item: dict, response: httpx.Response) -> Seen:
        seen, meta = Seen(), item["meta_info"]
        seen.prompt_tokens, seen.cached_tokens = meta["prompt_tokens"], meta["cached_tokens"]
        seen.generated_tokens = meta["completion_tokens"]
        seen.finishes = [("/generate", meta["finish_reason"]["type"])]
        seen.statuses = [("/generate", str(response.status_code))]
        return seen


def a_mixed_run(http: httpx.Client) -> Seen:
    """Sixty-odd requests of all kinds, eight at a time."""
    client = Client(http)
    jobs = []
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for i in range(8):
            is_even = i % 2 == 0
            jobs += [
                pool.submit(client.completion, f"prompt {i}", n=1, max_tokens=20, stream=is_even),
                pool.submit(client.completion, f"two of {i}", n=2, max_tokens=10, stream=is_even),
                pool.submit(client.completion, f"ab.{i}", n=1, max_tokens=50, stream=is_even, stop="."),
                pool.submit(client.completion, "shared", n=1, max_tokens=3, stream=False),
                pool.submit(client.generate, [1, 2, i], stream=is_even),
                pool.submit(client.generate, [3, 4, i], stream=True, abort_after=5 + i),
                pool.submit(client.leave, [5, 6, i], after=1 + 2 * i),
                pool.submit(client.fail),
            ]
    seen = Seen()
    seen.add(*(job.result() for job in jobs))
    return seen


@pytest.fixture(scope="module")
def after_run(make_server: ServerMaker) -> Iterator[tuple[Scrape, Seen]]:
    """A server's counters after a mixed run, and what its clients saw."""
    with make_server() as server:
        seen = a_mixed_run(server.http)
        yield scrape_until(server.http, quiet), seen


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
        assert keys <= set(CORE_STATS) | set(LOOP_STATS)

    def test_both_formats_have_the_same_names(self, http: httpx.Client):
        """Prometheus asks for OpenMetrics first; names must not change with it."""
        text = scrape(http)
        accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
        response = http.get("/metrics", headers={"Accept": accept})
        assert response.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert response.text.endswith("# EOF\n")
        names = {sample.name for family in openmetrics_families(response.text) for sample in family.samples}
        assert names == set(text.samples)
        assert all(name.startswith("jsg:") for name in names)

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
        body_is_bad = b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n"
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


def test_metrics_need_a_key(make_server: ServerMaker):
    with make_server(server={"api_key": ["k1", "k2"]}) as server:
        assert server.http.get("/metrics").status_code == 401
        result = scrape(server.http, headers={"Authorization": "Bearer k2"})
        assert result.get("jsg:http_requests_total", route="/metrics", status="401") == 1


def test_metrics_answer_while_the_engine_loads(make_server: ServerMaker, tmp_path):
    wait_for = tmp_path / "go"
    port = free_port()
    with make_server(engine={"tokenizer_path": str(wait_for)}, server={"port": port}, wait=False) as server:
        server.http.base_url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(httpx.TransportError):
                result = scrape(server.http)
                break
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert result.get("jsg:engine_up") == 0
        wait_for.touch()
        server.wait_until_ready()
        assert scrape(server.http).get("jsg:engine_up") == 1
        assert "jsg:requests_running" in scrape(server.http).samples


def test_a_scrape_does_not_wait_for_an_engine_that_stands_still(make_server: ServerMaker):
    with make_server() as server:
        pid = server.stats()["pid"]
        before = scrape(server.http)
        os.kill(pid, signal.SIGSTOP)
        try:
            with concurrent.futures.ThreadPoolExecutor(8) as pool:
                results = [*pool.map(lambda _: scrape(server.http), range(8))]  # before the engine goes on
            for result in results:
                assert result.get("jsg:engine_steps_total") == before.get("jsg:engine_steps_total")
                assert result.get("jsg:engine_stats_age_seconds") >= 0.9
        finally:
            os.kill(pid, signal.SIGCONT)
        scrape_until(server.http, lambda result: result.get("jsg:engine_stats_age_seconds") < 0.9)


@pytest.mark.slow
def test_an_engine_that_stands_still_is_not_up(make_server: ServerMaker):
    with make_server() as server:
        pid = server.stats()["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            scrape_until(server.http, lambda result: result.get("jsg:engine_up") == 0)
        finally:
            os.kill(pid, signal.SIGCONT)
        scrape_until(server.http, lambda result: result.get("jsg:engine_up") == 1)


def test_scrapes_share_one_question_and_the_last_answer_is_kept():
    class Engine:
        is_alive, is_stalled = True, False
        info = SimpleNamespace(max_total_tokens=100)

        def __init__(self) -> None:
            self.num_asked = 0
            self.answered = asyncio.Event()

        async def stats(self) -> dict[str, int]:
            self.num_asked += 1
            await self.answered.wait()
            if self.num_asked > 1:
                raise EngineDeadError("x")
            return {"num_running": 5}

    async def run() -> None:
        engine, now = Engine(), 10.0
        stats = EngineStats(engine, now=lambda: now)  # pyright: ignore[reportArgumentType]
        for _ in range(2):
            await asyncio.gather(*(stats.refresh(timeout_s=0.01) for _ in range(5)))
        assert engine.num_asked == 1
        assert "jsg:requests_running" not in {family.name for family in stats.families()}
        engine.answered.set()
        await stats.refresh()
        now = 13.0
        await stats.refresh()
        assert engine.num_asked == 2
        values = {family.name: family.samples[0].value for family in stats.families()}
        assert values["jsg:requests_running"] == 5
        assert values["jsg:engine_stats_age_seconds"] == 3

    asyncio.run(run())


def test_requests_under_way_are_seen(server: RunningServer, http: httpx.Client):
    with server.holding(3):
        result = scrape(http)
        assert (result.get("jsg:answers_open"), result.get("jsg:requests_running")) == (3, 3)
        assert result.get("jsg:kv_used_tokens") > 0
    scrape_until(http, quiet)


def test_a_list_that_the_engine_refuses_counts_as_refused(make_server: ServerMaker):
    with make_server() as server:
        assert server.http.post("/generate", json={"input_ids": [[1], [VOCAB_SIZE]]}).status_code == 400
        result = scrape_until(server.http, quiet)
        assert set(result.by("jsg:requests_aborted_total", "reason")) <= {"refused"}


class TestAbortReasons:
    def test_a_full_queue(self, make_server: ServerMaker):
        knobs = {"max_running_requests": 1, "max_queued_requests": 1}
        with make_server(engine=knobs) as server, server.holding(1):
            server.wait_for_stats(num_running=1)
            with server.holding(1):
                assert server.http.post("/generate", json={"text": "a"}).status_code == 503
                result = scrape(server.http)
                assert result.by("jsg:requests_aborted_total", "reason") == {"queue_full": 1}

    def test_a_wait_in_the_queue(self, make_server: ServerMaker):
        with make_server(engine={"max_running_requests": 1, "queue_timeout": 0.2}) as server, server.holding(1):
            assert server.http.post("/generate", json={"text": "a"}).status_code == 503
            assert scrape(server.http).by("jsg:requests_aborted_total", "reason") == {"queue_timeout": 1}

    @pytest.mark.parametrize("stream", [True, False])
    def test_an_abort_of_two_answers_whose_client_is_told_of_an_error(self, make_server: ServerMaker, stream: bool):
        body = {"prompt": "a", "n": 2, "max_tokens": 900, "rid": "two", "stream": stream}
        with make_server() as server, concurrent.futures.ThreadPoolExecutor() as pool:
            asking = pool.submit(server.http.post, "/v1/completions", json=body)
            server.wait_for_stats(num_running=2)
            assert httpx.post(f"{server.http.base_url}/abort_request", json={"rid": "two"}).json()["aborted"] == 2
            assert "abort" in asking.result().text
            result = scrape_until(server.http, quiet)
            assert result.by("jsg:requests_aborted_total", "reason") == {"abort_request": 2}
            lost = result.by("jsg:generation_tokens_discarded_total", "reason")
            assert lost == {"abort_request": result.get("jsg:generation_tokens_total")}

    def test_time_limits(self, make_server: ServerMaker):
        with make_server(server={"request_timeout": 0.2}) as server:
            response = server.http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 1000}})
            assert response.status_code == 504
            result = scrape_until(server.http, quiet)
            assert result.by("jsg:requests_aborted_total", "reason") == {"request_timeout": 1}
            lost = result.by("jsg:generation_tokens_discarded_total", "reason")
            assert lost == {"request_timeout": result.get("jsg:generation_tokens_total")}

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (FirstTokenTimeoutError("x"), "first_token_timeout"),
            (QueueTimeoutError("x"), "queue_timeout"),
            (ShuttingDownError("x"), "shutdown"),
            (EngineDeadError("x"), "engine_dead"),
            (JsgError("x"), "error"),
            (ValueError("x"), "error"),
            (GeneratorExit(), "client_disconnect"),
        ],
    )
    def test_each_error_has_one(self, error: BaseException, reason: str):
        assert abort_reason(error) == reason
        assert reason in ABORT_REASONS


def scripted(n: int = 1, num_prompts: int = 1, cached_tokens: int = 0) -> SimpleNamespace:
    """A generation that a test drives by hand."""
    prompts = [
        Prompt(rid=f"r{i}", input_ids=(1, 2, 3), sampling=SamplingParams(max_new_tokens=50, n=n))
        for i in range(num_prompts)
    ]
    answers = [SimpleAnswer(request, cached_tokens) for prompt in prompts for request in prompt.requests(fresh_seed=0)]
    call = ApiCall(caller=Caller(), route="/generate", request_id="x")
    return SimpleNamespace(call=call, prompts=prompts, answers=answers, started_at=0.0)


class SimpleAnswer:
    """An answer without a tokenizer."""

    def __init__(self, request, cached_tokens: int) -> None:
        self.request = request
        self.cached_tokens = cached_tokens
        self.token_ids: list[int] = []
        self.elapsed_s = self.queue_s = 0.0
        self.first_token_s: float | None = None
        self.finish: FinishReason | None = None

    def push(self, at: float, num_tokens: int, finish: FinishType | None = None) -> AnswerDelta:
        self.elapsed_s = at
        self.first_token_s = at if self.first_token_s is None and num_tokens else self.first_token_s
        self.token_ids += [7] * num_tokens
        self.finish = None if finish is None else FinishReason(finish)
        return AnswerDelta(text="", token_ids=(7,) * num_tokens, logprobs=(), finish=self.finish)


def scraped(metrics: Metrics, accept: str = "") -> Scrape:
    telemetry = Telemetry(ServerConfig(metrics_alias="vllm"), "m")
    telemetry.metrics = metrics
    from jsg.server.telemetry.exposition import encoded

    return Scrape(encoded(telemetry.families(), accept)[0].decode())


class TestCounting:
    def test_tokens_that_come_together_share_the_gap(self):
        metrics, generation = Metrics(), scripted()
        answer = generation.answers[0]
        metrics.on_start(generation)
        for at, num_tokens in ((1.0, 1), (1.27, 3), (1.31, 2)):
            metrics.on_delta(generation, answer, answer.push(at, num_tokens))
        result = scraped(metrics)
        assert result.get("jsg:inter_token_latency_seconds_count") == 5
        assert result.get("jsg:inter_token_latency_seconds_sum") == pytest.approx(0.31)
        assert result.get("jsg:inter_token_latency_seconds_bucket", le="0.1") == 5
        assert result.get("jsg:inter_token_latency_seconds_bucket", le="0.05") == 2
        assert result.get("jsg:time_to_first_token_seconds_sum") == 1.0

    def test_a_value_on_a_bound_belongs_to_its_bucket(self):
        metrics = Metrics()
        metrics.loop_lag.observe(0.001)
        assert scraped(metrics).get("jsg:event_loop_lag_seconds_bucket", le="0.001") == 1

    def test_a_prompt_counts_once_whichever_answer_comes_first(self):
        metrics, generation = Metrics(), scripted(n=3, num_prompts=2, cached_tokens=2)
        metrics.on_start(generation)
        for answer in reversed(generation.answers):
            metrics.on_delta(generation, answer, answer.push(1.0, 1, FinishType.LENGTH))
        metrics.on_end(generation, None)
        result = scraped(metrics)
        assert result.get("jsg:prompt_tokens_total") == 6
        assert result.get("jsg:cached_tokens_total") == 4
        assert result.get("jsg:requests_finished_total") == 6

    def test_what_never_ran_has_no_prompt_tokens_and_no_waits(self):
        metrics, generation = Metrics(), scripted(n=2)
        metrics.on_start(generation)
        answer = generation.answers[0]
        metrics.on_delta(generation, answer, answer.push(1.0, 0, FinishType.ABORT))
        assert scraped(metrics).get("jsg:answers_open") == 1
        metrics.on_end(generation, ShuttingDownError("x"))
        result = scraped(metrics)
        assert result.get("jsg:prompt_tokens_total") == 0
        assert result.get("jsg:queue_time_seconds_count") == 0
        assert result.by("jsg:requests_aborted_total", "reason") == {"abort_request": 1, "shutdown": 1}
        assert result.get("jsg:answers_open") == 0

    def test_each_unfinished_answer_counts(self):
        metrics, generation = Metrics(), scripted(n=3)
        metrics.on_start(generation)
        answer = generation.answers[0]
        metrics.on_delta(generation, answer, answer.push(1.0, 1))
        metrics.on_end(generation, EngineDeadError("x"))
        metrics.on_end(generation, EngineDeadError("x"))  # and once only
        assert scraped(metrics).by("jsg:requests_aborted_total", "reason") == {"engine_dead": 3}

    def test_an_answer_without_tokens_counts_its_prompt(self):
        metrics, generation = Metrics(), scripted()
        metrics.on_start(generation)
        answer = generation.answers[0]
        metrics.on_delta(generation, answer, answer.push(1.0, 0, FinishType.LENGTH))
        result = scraped(metrics)
        assert result.get("jsg:prompt_tokens_total") == 3
        assert result.get("jsg:e2e_request_latency_seconds_count") == 1
        assert result.get("jsg:time_to_first_token_seconds_count") == 0

    def test_the_throughput_is_that_of_the_window(self):
        now = 0.0
        metrics, generation = Metrics(now=lambda: now), scripted()
        metrics.on_start(generation)
        answer = generation.answers[0]
        for second in range(1, 31):
            now = float(second)
            metrics.on_delta(generation, answer, answer.push(now, 4))
            metrics.sample_rate()
        assert scraped(metrics).get("jsg:generation_throughput") == pytest.approx(4)
        for second in range(31, 31 + int(RATE_WINDOW_S) + 1):
            now = float(second)
            metrics.sample_rate()
        assert scraped(metrics).get("jsg:generation_throughput") == 0

    def test_a_delta_costs_little(self):
        """3 µs at most, on a machine that others use too: the best of several runs."""
        metrics, generation = Metrics(), scripted(n=64)
        metrics.on_start(generation)
        deltas = [(answer, answer.push(1.0, 1)) for answer in generation.answers]
        best = math.inf
        for _ in range(20):
            started = time.perf_counter()
            for answer, delta in deltas:
                metrics.on_delta(generation, answer, delta)
            best = min(best, (time.perf_counter() - started) / len(deltas))
        assert best < MAX_DELTA_S


class TestAliases:
    @pytest.fixture(scope="class", params=sorted(ALIASES))
    @classmethod
    def aliased(cls, request: pytest.FixtureRequest, make_server: ServerMaker) -> Iterator[tuple[str, Scrape]]:
        with make_server(server={"metrics_alias": request.param, "served_model_name": "my-model"}) as server:
            client = Client(server.http)
            client.completion("hello", n=2, max_tokens=4, stream=True)
            client.leave([1, 2], after=1)
            yield request.param, scrape_until(server.http, quiet)

    def test_each_is_there_with_the_model_and_the_value_of_ours(self, aliased: tuple[str, Scrape]):
        server, result = aliased
        for alias in ALIASES[server]:
            suffixes = ("_sum", "_count", "_bucket") if f"{alias.source}_count" in result.samples else ("",)
            for suffix in suffixes:
                theirs = result.samples[alias.name + suffix]
                assert all(dict(labels)["model_name"] == "my-model" for labels in theirs), alias.name
                if not alias.constants and alias.source != "jsg:generation_throughput":
                    wanted = {"finished_reason": ("stop", "length")} if alias.labels else {}
                    found = sum(
                        value
                        for labels, value in theirs.items()
                        if all(dict(labels)[label] in values for label, values in wanted.items())
                    )
                    assert found == result.get(alias.source + suffix), alias.name
        assert result.get("jsg:generation_tokens_total") > 8

    def test_no_name_is_of_the_other_server(self, aliased: tuple[str, Scrape]):
        server, result = aliased
        assert {name.partition(":")[0] for name in result.samples} == {"jsg", server}

    def test_vllm_tells_how_requests_ended(self, aliased: tuple[str, Scrape]):
        server, result = aliased
        if server == "vllm":
            by_reason = result.by("vllm:request_success_total", "finished_reason")
            assert by_reason == {"length": 2, "abort": 1}


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
