"""Computes the figures of a run. Every definition of a latency is here; `docs/benchmarking.md` explains them."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.serving.client import Outcome
from bench.serving.load import Run

PERCENTILES = (50, 90, 95, 99)
LATE_MS = 10.0  # the client's times are not reliable if its event loop is later than this in one case of a hundred


@dataclasses.dataclass(frozen=True, slots=True)
class Latencies:
    """The latencies of one complete answer, in milliseconds.

    Attributes:
        ttft: From sending to the first event with a token; None if nothing was streamed or generated.
        e2e: From sending to the end of the body.
        tpot: The mean time per token, without the tokens of the first event.
        event_gaps: The gaps between events with tokens.
        token_gaps: A gap for each token after those of the first event. An event of k tokens gives k gaps, each a k-th
            of its event's gap. If the server does not say how many tokens an event has, and there are fewer events than
            tokens, every gap is the mean.
        is_estimated: Whether every gap is the mean.
    """

    ttft: float | None
    e2e: float
    tpot: float | None
    event_gaps: list[float]
    token_gaps: list[float]
    is_estimated: bool


def latencies(outcome: Outcome) -> Latencies:
    """The latencies of a complete answer."""
    times = [when for when, _ in outcome.arrivals]
    event_gaps = [1e3 * (after - before) for before, after in itertools.pairwise(times)]
    counts = tokens_of_events(outcome)
    num_tokens = output_tokens(outcome)
    if counts is None:
        num_later = num_tokens - 1
        token_gaps = [1e3 * (times[-1] - times[0]) / num_later] * num_later if event_gaps and num_later > 0 else []
    else:
        later = list(zip(event_gaps, counts[1:], strict=True))
        num_later = sum(count for _, count in later)
        token_gaps = [gap / count for gap, count in later for _ in range(count)]
    return Latencies(
        ttft=1e3 * (times[0] - outcome.sent_s) if times else None,
        e2e=1e3 * (outcome.ended_s - outcome.sent_s),
        tpot=1e3 * (times[-1] - times[0]) / num_later if event_gaps and num_later > 0 else None,
        event_gaps=event_gaps,
        token_gaps=token_gaps,
        is_estimated=counts is None,
    )


def tokens_of_events(outcome: Outcome) -> list[int] | None:
    """How many tokens each event had; None if that cannot be known."""
    so_far = [count for _, count in outcome.arrivals if count is not None]
    if len(so_far) == len(outcome.arrivals):
        return [after - before for before, after in itertools.pairwise([0, *so_far])]
    if output_tokens(outcome) == len(outcome.arrivals):
        return [1] * len(outcome.arrivals)
    return None


def output_tokens(outcome: Outcome) -> int:
    """The server's number of generated tokens or, if it gives none, the number of events with text."""
    said = outcome.reading.num_tokens
    return len(outcome.arrivals) if said is None else said


def prompt_tokens(outcome: Outcome) -> int:
    """The server's number of prompt tokens or, if it gives none, that of the workload."""
    said = outcome.reading.prompt_tokens
    return outcome.approximate_prompt_len if said is None else said


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile, with linear interpolation between the two nearest ranks, as in numpy."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Count, mean, extremes and percentiles; None if there are no samples."""
    if not values:
        return None
    found = {"count": len(values), "mean": sum(values) / len(values), "min": min(values), "max": max(values)}
    return found | {f"p{percent}": percentile(values, percent) for percent in PERCENTILES}


def is_good(latency: Latencies, limits_ms: Mapping[str, float]) -> bool:
    """Whether a complete answer kept every limit: `ttft`, `e2e`, `tpot` (mean), `itl` (largest gap of two events).

    It keeps the limit of a latency that it does not have, such as `itl` for an answer of one token.
    """
    seen = {
        "ttft": latency.ttft,
        "e2e": latency.e2e,
        "tpot": latency.tpot,
        "itl": max(latency.event_gaps, default=None),
    }
    return all(seen[name] is None or seen[name] <= limit for name, limit in limits_ms.items())


def summary(run: Run, limits_ms: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Every figure of a run.

    Rates are per second of the whole time, from the start of the load to the end of the last answer. They do not count
    the tokens of failed answers.
    """
    complete = [outcome for outcome in run.outcomes if outcome.error is None]
    each = [latencies(outcome) for outcome in complete]
    inputs, outputs = sum(map(prompt_tokens, complete)), sum(map(output_tokens, complete))
    found: dict[str, Any] = {
        "requests": len(run.outcomes),
        "complete": len(complete),
        "errors": dict(collections.Counter(o.error for o in run.outcomes if o.error is not None).most_common()),
        "error_examples": {o.error: o.message for o in run.outcomes if o.error is not None and o.message},
        "wall_s": run.wall_s,
        "requests_per_s": len(complete) / run.wall_s,
        "input_tokens_per_s": inputs / run.wall_s,
        "output_tokens_per_s": outputs / run.wall_s,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "token_events": sum(len(outcome.arrivals) for outcome in complete),
        "cached_tokens": _total(outcome.reading.cached_tokens for outcome in complete),
        "ttft_ms": distribution([one.ttft for one in each if one.ttft is not None]),
        "tpot_ms": distribution([one.tpot for one in each if one.tpot is not None]),
        "itl_event_ms": distribution(list(itertools.chain.from_iterable(one.event_gaps for one in each))),
        "itl_token_ms": distribution(list(itertools.chain.from_iterable(one.token_gaps for one in each))),
        "e2e_ms": distribution([one.e2e for one in each]),
        "client": client_figures(run),
        "caveats": caveats(run, complete, each),
    }
    cached = found["cached_tokens"]
    found["cached_share"] = cached / inputs if cached is not None and inputs else None
    if limits_ms:
        good = sum(is_good(one, limits_ms) for one in each)
        found["goodput"] = {"limits_ms": dict(limits_ms), "good": good, "good_requests_per_s": good / run.wall_s}
        found["goodput"]["share"] = good / len(run.outcomes) if run.outcomes else None
    return found


def client_figures(run: Run) -> dict[str, Any]:
    """The figures that show whether this client was fast enough."""
    return {
        "cpu_share": run.cpu_s / run.wall_s,
        "event_loop_lag_ms": distribution([1e3 * lag for lag in run.lags_s]),
        "sent_late_ms": distribution([1e3 * (outcome.sent_s - outcome.due_s) for outcome in run.outcomes]),
    }


def caveats(run: Run, complete: Sequence[Outcome], each: Sequence[Latencies]) -> list[str]:
    """What a reader of the figures must know."""
    found = []
    lag = distribution([1e3 * lag for lag in run.lags_s])
    if lag is not None and lag["p99"] > LATE_MS:
        found.append(
            f"the client was not fast enough: p99 of its event-loop lag is {lag['p99']:.0f} ms, so latencies are too "
            "large by about that; use a faster machine, a core of its own, or several clients"
        )
    if num_estimated := sum(one.is_estimated for one in each):
        found.append(
            f"{num_estimated} answers had events of several tokens and no count of them: their itl_token_ms is a mean; "
            "--continuous-usage makes vLLM, SGLang and jsg tell"
        )
    if unsaid := sum(outcome.reading.num_tokens is None for outcome in complete):
        found.append(f"{unsaid} answers came without usage: their tokens are counted as events, their prompts as meant")
    if undone := sum(bool(outcome.arrivals) and not outcome.has_done for outcome in complete):
        found.append(f"{undone} streams ended without [DONE]")
    if short := sum(output_tokens(o) < o.asked_tokens for o in complete):
        found.append(f"{short} answers ended before their length; --ignore-eos makes lengths those of the workload")
    return found


def timeline(outcomes: Sequence[Outcome], wall_s: float, num_bins: int) -> dict[str, list[float]]:
    """Open requests (mean of each bin) and arrived tokens per second over the time of the run."""
    width = wall_s / num_bins
    under_way, tokens = [0.0] * num_bins, [0.0] * num_bins
    for outcome in outcomes:
        first = max(0, int(outcome.sent_s / width))
        for place in range(first, min(num_bins, math.ceil(outcome.ended_s / width))):
            shared = min(outcome.ended_s, (place + 1) * width) - max(outcome.sent_s, place * width)
            under_way[place] += max(0.0, shared) / width
        share = output_tokens(outcome) / len(outcome.arrivals) if outcome.arrivals else 0.0
        counts = tokens_of_events(outcome) or [share] * len(outcome.arrivals)
        for (when, _), count in zip(outcome.arrivals, counts, strict=True):
            tokens[min(num_bins - 1, int(when / width))] += count / width
    return {"start_s": [place * width for place in range(num_bins)], "under_way": under_way, "tokens_per_s": tokens}


def _total(values: Any) -> int | None:
    """The sum of the known numbers; None if none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None
