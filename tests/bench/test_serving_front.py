"""`bench.front` runs. Its figures are in docs/performance.md, because a test that checks a speed fails by chance."""

import pytest

from bench.front import (
    LAG_METRIC,
    STREAM_APIS,
    _percentile_bound,
    _steady_rate,
    measure_null,
    measure_scrapes,
    measure_streams,
    measure_ttft,
)
from bench.report import Report
from bench.serving.client import Outcome
from bench.serving.dialects import Reading
from bench.serving.load import Run

MAX_MEMORY_GIB = 1.5


def values_of(report: Report) -> dict[str, float]:
    return {figure.name: figure.samples[0] for figure in report.figures}


def stream(times: list[float], num_tokens: int) -> Outcome:
    arrivals = [(when, None) for when in times]
    return Outcome(group=0, due_s=0, sent_s=0, arrivals=arrivals, reading=Reading(num_tokens=num_tokens))


def test_the_steady_rate_is_that_of_the_time_when_all_streams_run():
    run = Run([stream([0, 1, 2, 3, 4], 10), stream([2, 3, 4, 5, 6], 10)], 6.0, 0.0, [])
    assert _steady_rate(run) == (6 * 2 / 2, 0.5, 1.0)


def test_a_percentile_of_buckets_has_a_bound():
    buckets = {0.001: 90.0, 0.01: 98.0, 0.05: 100.0, float("inf"): 100.0}
    assert [_percentile_bound(buckets, percent) for percent in (50, 98, 99)] == [0.001, 0.01, 0.05]


@pytest.mark.slow
def test_every_token_of_a_null_engine_arrives():
    """The texts are checked inside; with a core for the front and one for the rest."""
    report = Report("bench.front", [], None)
    measure_null(report, "openai-completions", 8, (400,), 0.5)
    offered, summary, per_cpu = report.figures
    assert offered.facts["events_per_token"] <= 1 and offered.facts["front_cpu_share"] > 0
    assert summary.facts["in_any_events"] == offered.samples[0] > 0 and per_cpu.samples[0] > 0


@pytest.mark.slow
def test_the_first_token_is_timed_on_both_sides():
    report = Report("bench.front", [], None)
    measure_ttft(report, 5)
    assert len([name for name in values_of(report) if "above in process" in name]) == 2


@pytest.mark.slow
def test_scrapes_have_a_price():
    report = Report("bench.front", [], None)
    measure_scrapes(report, 0.5)
    health, *scrapes = report.figures
    assert health.facts["bytes"] < 100 and all(figure.facts["bytes"] > 10_000 for figure in scrapes)


@pytest.mark.slow
@pytest.mark.parametrize("api", [pytest.param(api, marks=pytest.mark.long) for api in STREAM_APIS])
def test_64_streams_lose_nothing(api):
    """It is long: `test_every_token_of_a_null_engine_arrives` has eight streams."""
    report = Report("bench.front", [], None)
    measure_streams(report, api, 64, 10.0)
    values = {name.partition(": ")[2]: value for name, value in values_of(report).items()}
    assert values["answers that are not whole"] == 0 and values[f"p99, {LAG_METRIC} is at most"] > 0
    assert values["both processes, shared pages once"] <= MAX_MEMORY_GIB
