"""The front's own measurements, and the limits that they are held to."""

import pytest

from bench.front import (
    LAG_METRIC,
    STREAM_APIS,
    _percentile_bound,
    _steady_rate,
    measure_null,
    measure_streams,
    measure_ttft,
)
from bench.report import Report
from bench.serving.client import Outcome
from bench.serving.dialects import Reading
from bench.serving.load import Run

MAX_TTFT_ADDED_MS = 5
MAX_LAG_MS = 50
MIN_TOKENS_PER_S = 4000
MAX_MEMORY_GIB = 1.5


def values_of(report: Report) -> dict[str, float]:
    return {figure.name: figure.samples[0] for figure in report.figures}


def stream(times: list[float], num_tokens: int) -> Outcome:
    arrivals = [(when, None) for when in times]
    return Outcome(group=0, due_s=0, sent_s=0, arrivals=arrivals, reading=Reading(num_tokens=num_tokens))


def test_the_steady_rate_is_that_of_the_time_when_all_streams_run():
    run = Run([stream([0, 1, 2, 3, 4], 10), stream([2, 3, 4, 5, 6], 10)], 6.0, 0.0, [])
    assert _steady_rate(run) == (6 * 2 / 2, 0.5)


def test_a_percentile_of_buckets_has_a_bound():
    buckets = {0.001: 90.0, 0.01: 98.0, 0.05: 100.0, float("inf"): 100.0}
    assert [_percentile_bound(buckets, percent) for percent in (50, 98, 99)] == [0.001, 0.01, 0.05]


def test_every_token_of_a_null_engine_arrives():
    """The texts are checked inside; with a core for the front and one for the rest."""
    report = Report("bench.front", [], None)
    measure_null(report, "openai-completions", 8, (400,), 0.5)
    offered, summary, per_cpu = report.figures
    assert offered.facts["events_per_token"] <= 1 and offered.facts["front_cpu_share"] > 0
    assert summary.facts["in_any_events"] == offered.samples[0] > 0 and per_cpu.samples[0] > 0


@pytest.mark.slow
@pytest.mark.parametrize("api", ["openai-chat", "openai-completions"])
def test_the_front_streams_thousands_of_tokens_on_one_core(api):
    report = Report("bench.front", [], None)
    measure_null(report, api, 64, (5000, 8000), 5.0)
    assert report.figures[-2].samples[0] >= MIN_TOKENS_PER_S


@pytest.mark.slow
def test_http_adds_little_to_the_first_token():
    report = Report("bench.front", [], None)
    measure_ttft(report, 100)
    added = [value for name, value in values_of(report).items() if "above in process" in name]
    assert len(added) == 2 and max(added) <= MAX_TTFT_ADDED_MS


@pytest.mark.slow
@pytest.mark.parametrize("api", STREAM_APIS)
def test_64_streams_for_a_minute(api):
    report = Report("bench.front", [], None)
    measure_streams(report, api, 64, 60.0)
    values = {name.partition(": ")[2]: value for name, value in values_of(report).items()}
    assert values["answers that are not whole"] == 0
    # What a process that does nothing is late by is the machine's part.
    assert values["p99, /health answers after"] - values["p99, an idle process is late by"] <= MAX_LAG_MS
    assert values[f"p99, {LAG_METRIC} is at most"] <= max(MAX_LAG_MS, 2 * values["p99, an idle process is late by"])
    assert values["both processes, shared pages once"] <= MAX_MEMORY_GIB
