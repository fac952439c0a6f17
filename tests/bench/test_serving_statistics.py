"""The figures of the load generator, against numbers that were calculated by hand."""

import json

import pytest

from bench.serving import report
from bench.serving.client import Outcome
from bench.serving.dialects import Reading
from bench.serving.load import Run
from bench.serving.statistics import (
    Latencies,
    distribution,
    is_good,
    latencies,
    percentile,
    summary,
    timeline,
    tokens_of_events,
)


def outcome(
    sent_s: float, arrivals: list[tuple[float, int | None]], ended_s: float, error: str | None = None, **reading
) -> Outcome:
    return Outcome(
        group=0,
        due_s=sent_s,
        sent_s=sent_s,
        ended_s=ended_s,
        arrivals=arrivals,
        asked_tokens=4,
        approximate_prompt_len=10,
        reading=Reading(**reading),
        error=error,
        has_done=True,
    )


def test_percentiles_lie_between_ranks():
    assert [percentile([4.0, 1.0, 3.0, 2.0], percent) for percent in (0, 50, 90, 100)] == [
        1,
        2.5,
        pytest.approx(3.7),
        4,
    ]
    assert percentile([5.0], 99) == 5
    values = distribution([float(i) for i in range(101)])
    assert values == {"count": 101, "mean": 50, "min": 0, "max": 100, "p50": 50, "p90": 90, "p95": 95, "p99": 99}
    assert distribution([]) is None


def test_an_event_of_several_tokens_shares_its_gap():
    seen = latencies(outcome(1.0, [(1.5, 1), (2.0, 3), (2.25, 4)], 3.0, num_tokens=4))
    assert seen == Latencies(
        ttft=500, e2e=2000, tpot=250, event_gaps=[500, 250], token_gaps=[250, 250, 250], is_estimated=False
    )


def test_tokens_of_the_first_event_are_in_no_gap():
    seen = latencies(outcome(0.0, [(1.0, 3), (2.0, 4)], 2.0, num_tokens=4))
    assert (seen.tpot, seen.token_gaps) == (1000, [1000])


def test_without_counts_events_are_tokens_where_there_are_as_many():
    assert tokens_of_events(outcome(0.0, [(1.0, None), (2.0, None)], 2.0, num_tokens=2)) == [1, 1]
    assert tokens_of_events(outcome(0.0, [(1.0, None), (2.0, None)], 2.0, num_tokens=3)) is None
    seen = latencies(outcome(0.0, [(1.0, None), (2.0, None)], 2.0, num_tokens=3))
    assert (seen.token_gaps, seen.is_estimated) == ([500, 500], True)


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_answers_of_one_token_or_none_have_no_gaps(num_tokens):
    seen = latencies(outcome(0.0, [(1.0, None)] * num_tokens, 2.0, num_tokens=num_tokens))
    assert (seen.ttft, seen.tpot, seen.event_gaps, seen.token_gaps) == (1000 if num_tokens else None, None, [], [])


@pytest.mark.parametrize(
    ("limits", "is_kept"),
    [
        ({"ttft": 100}, True),
        ({"ttft": 99}, False),
        ({"tpot": 20}, True),
        ({"tpot": 19}, False),
        ({"itl": 30}, True),
        ({"itl": 29}, False),
        ({"e2e": 200}, True),
        ({"e2e": 199, "ttft": 100}, False),
    ],
)
def test_goodput_needs_every_limit(limits, is_kept):
    seen = Latencies(ttft=100, e2e=200, tpot=20, event_gaps=[10, 30], token_gaps=[10, 30], is_estimated=False)
    assert is_good(seen, limits) is is_kept


def test_an_answer_without_gaps_keeps_their_limits():
    seen = Latencies(ttft=1, e2e=1, tpot=None, event_gaps=[], token_gaps=[], is_estimated=False)
    assert is_good(seen, {"itl": 1, "tpot": 1})


OUTCOMES = [
    outcome(0.0, [(1.0, 1), (2.0, 2)], 2.0, num_tokens=2, prompt_tokens=6, cached_tokens=3, finish="length"),
    outcome(1.0, [(1.5, 1), (2.5, 4)], 4.0, num_tokens=4, prompt_tokens=6, cached_tokens=6, finish="length"),
    outcome(1.0, [(1.5, 1)], 2.0, error="http_503"),
]
RUN = Run(outcomes=OUTCOMES, wall_s=4.0, cpu_s=1.0, lags_s=[0.001] * 99 + [0.5])


def test_a_summary():
    found = summary(RUN, {"ttft": 600})
    assert (found["requests"], found["complete"], found["errors"]) == (3, 2, {"http_503": 1})
    assert (found["requests_per_s"], found["input_tokens_per_s"], found["output_tokens_per_s"]) == (0.5, 3, 1.5)
    assert (found["cached_tokens"], found["cached_share"]) == (9, 0.75)
    assert (found["ttft_ms"]["min"], found["ttft_ms"]["max"], found["e2e_ms"]["mean"]) == (500, 1000, 2500)
    assert (found["itl_event_ms"]["count"], found["itl_token_ms"]["count"]) == (2, 4)
    assert found["goodput"] == {"limits_ms": {"ttft": 600}, "good": 1, "good_requests_per_s": 0.25, "share": 1 / 3}
    assert found["client"]["cpu_share"] == 0.25


def test_a_slow_client_is_said():
    assert not any("not fast enough" in caveat for caveat in summary(RUN)["caveats"])
    late = Run(outcomes=OUTCOMES, wall_s=4.0, cpu_s=1.0, lags_s=[0.001] * 90 + [0.1] * 10)
    assert any("not fast enough" in caveat for caveat in summary(late)["caveats"])
    assert "not fast enough" in report.table(summary(late))


def test_a_run_in_which_all_failed_has_a_table():
    run = Run(outcomes=OUTCOMES[2:], wall_s=4.0, cpu_s=1.0, lags_s=[])
    found = summary(run, {"ttft": 1})
    assert found["ttft_ms"] is None and found["goodput"]["share"] == 0
    assert "failed: http_503" in report.table(found)


def test_the_timeline_counts_requests_and_tokens():
    bins = timeline(OUTCOMES[:2], 4.0, 4)
    assert bins["start_s"] == [0, 1, 2, 3] and bins["under_way"] == [1, 2, 1, 1]
    assert bins["tokens_per_s"] == [0, 2, 4, 0]


def test_the_file_has_a_line_for_each_request_and_no_secret(tmp_path):
    head = report.header(["--api-key", "abc", "--api-key=def", "--seed", "1"], {"model": "m"})
    assert head["command"] == "python -m bench.serving --api-key *** --api-key=*** --seed 1"
    output = tmp_path / "deep" / "run.json"
    report.write(output, report.as_json(head, summary(RUN), RUN, with_events=True))
    content = json.loads(output.read_text())
    assert {"date", "commit", "cpu", "versions", "server"} <= content["header"].keys()
    assert [line["error"] for line in content["requests"]] == [None, None, "http_503"]
    assert content["requests"][1]["arrivals"] == [[1.5, 1], [2.5, 4]]
    assert "arrivals" not in report.request_line(OUTCOMES[0], with_events=False)


def test_there_is_a_plot(tmp_path):
    output = tmp_path / "deep" / "run.png"
    report.plot(output, summary(RUN), RUN)
    assert output.read_bytes().startswith(b"\x89PNG")
