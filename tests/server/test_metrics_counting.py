"""What `/metrics` counts of one answer, and of one that did not come to its end."""

import concurrent.futures
from typing import Any

import httpx
import pytest

from jsg.config import ServerConfig
from jsg.errors import EngineDeadError, FirstTokenTimeoutError, JsgError, QueueTimeoutError, ShuttingDownError
from jsg.server.observer import Begun
from jsg.server.telemetry.abort_reasons import ABORT_REASONS, end_reason
from jsg.server.telemetry.metrics import RATE_WINDOW_S, Metrics
from jsg.server.telemetry.telemetry import Telemetry
from jsg.speech.answers.answer import AnswerDelta, Prompt
from jsg.types import FinishReason, FinishType, SamplingParams
from tests.constrained.work import work
from tests.server.mixed_run import quiet
from tests.server.scrape import Scrape, scrape, scrape_until
from tests.server.threads import ServerMaker

MAX_DELTA_WORK = 12
"""Functions that are entered and loops that are turned for one delta."""


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
        assert end_reason([], error) == reason
        assert reason in ABORT_REASONS


def scripted(n: int = 1, num_prompts: int = 1, cached_tokens: int = 0) -> Any:
    """A generation that a test drives by hand."""
    prompts = [
        Prompt(rid=f"r{i}", input_ids=(1, 2, 3), sampling=SamplingParams(max_new_tokens=50, n=n))
        for i in range(num_prompts)
    ]
    answers = [SimpleAnswer(request, cached_tokens) for prompt in prompts for request in prompt.requests(fresh_seed=0)]
    return Begun("/generate", None, prompts, answers, started_at=0.0)


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
    from jsg.server.telemetry.exposition import encoded, prefers_openmetrics

    return Scrape(encoded(telemetry.families(), as_openmetrics=prefers_openmetrics(accept))[0].decode())


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
        assert result.get("jsg:prompt_tokens_total") == 6 and result.get("jsg:cached_tokens_total") == 4
        assert result.get("jsg:requests_finished_total") == 6

    def test_what_never_ran_has_no_prompt_tokens_and_no_waits(self):
        metrics, generation = Metrics(), scripted(n=2)
        metrics.on_start(generation)
        answer = generation.answers[0]
        metrics.on_delta(generation, answer, answer.push(1.0, 0, FinishType.ABORT))
        assert scraped(metrics).get("jsg:answers_open") == 1
        metrics.on_end(generation, ShuttingDownError("x"))
        result = scraped(metrics)
        assert result.get("jsg:prompt_tokens_total") == 0 and result.get("jsg:queue_time_seconds_count") == 0
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
        metrics, generation = Metrics(), scripted(n=64)
        metrics.on_start(generation)
        deltas = [(answer, answer.push(1.0, 1)) for answer in generation.answers]

        def take_all() -> None:
            for answer, delta in deltas:
                metrics.on_delta(generation, answer, delta)

        assert work(take_all) < MAX_DELTA_WORK * len(deltas)
