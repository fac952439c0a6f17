"""The report of a run: JSON for machines, a table for people, and plots."""

import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import describe_run
from bench.serving.client import Outcome
from bench.serving.load import Run
from bench.serving.statistics import (
    PERCENTILES,
    latencies,
    output_tokens,
    prompt_tokens,
    timeline,
)

CLIENT_PACKAGES = ("aiohttp", "msgspec", "matplotlib")
SECRET_OPTIONS = ("--api-key",)
NUM_BINS = 60
LATENCY_NAMES = {
    "ttft_ms": "time to first token",
    "tpot_ms": "time per output token",
    "itl_token_ms": "inter-token latency",
    "itl_event_ms": "between two events",
    "e2e_ms": "end to end",
}


def header(arguments: Sequence[str], server: dict[str, Any]) -> dict[str, Any]:
    """The circumstances of a run: the client's machine, and what the server says about itself."""
    described = describe_run("bench.serving", without_secrets(arguments))
    described["versions"] |= {name: importlib.metadata.version(name) for name in CLIENT_PACKAGES}
    return described | {"server": server}


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The command line without its secrets."""
    shown, hides_next = [], False
    for argument in arguments:
        name = argument.partition("=")[0]
        shown.append("***" if hides_next else f"{name}=***" if name in SECRET_OPTIONS and "=" in argument else argument)
        hides_next = argument in SECRET_OPTIONS
    return shown


def as_json(head: dict[str, Any], found: dict[str, Any], run: Run, *, with_events: bool) -> dict[str, Any]:
    """Everything: circumstances, figures, and a line for each request."""
    requests = [request_line(outcome, with_events=with_events) for outcome in run.outcomes]
    return {"header": head, "summary": rounded(found), "requests": requests}


def request_line(outcome: Outcome, *, with_events: bool) -> dict[str, Any]:
    """One request. With events it also has the time of each event and the number of tokens so far."""
    line: dict[str, Any] = {
        "group": outcome.group,
        "due_s": outcome.due_s,
        "sent_s": outcome.sent_s,
        "ended_s": outcome.ended_s,
        "error": outcome.error,
        "finish": outcome.reading.finish,
        "prompt_tokens": prompt_tokens(outcome),
        "cached_tokens": outcome.reading.cached_tokens,
        "asked_tokens": outcome.asked_tokens,
        "output_tokens": output_tokens(outcome),
        "events": len(outcome.arrivals),
    }
    if outcome.error is None:
        seen = latencies(outcome)
        line |= {"ttft_ms": seen.ttft, "tpot_ms": seen.tpot, "e2e_ms": seen.e2e}
    if with_events:
        line["arrivals"] = [list(arrival) for arrival in outcome.arrivals]
    return rounded(line)


def write(path: Path, content: dict[str, Any]) -> None:
    """Writes the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def table(found: dict[str, Any]) -> str:
    """The figures as lines of text."""
    lines = [f"{'requests':<32}{found['requests']:>10}", f"{'complete':<32}{found['complete']:>10}"]
    lines += [f"{'failed: ' + kind:<32}{count:>10}" for kind, count in found["errors"].items()]
    rates = {
        "time (s)": found["wall_s"],
        "requests per second": found["requests_per_s"],
        "input tokens per second": found["input_tokens_per_s"],
        "output tokens per second": found["output_tokens_per_s"],
    }
    lines += [f"{name:<32}{value:>10.2f}" for name, value in rates.items()]
    if found["cached_share"] is not None:
        lines.append(f"{'cached share of input tokens':<32}{found['cached_share']:>10.1%}")
    if goodput := found.get("goodput"):
        limits = " ".join(f"{name}:{limit:g}" for name, limit in goodput["limits_ms"].items())
        lines.append(f"{'good requests per second':<32}{goodput['good_requests_per_s']:>10.2f}  under {limits} (ms)")
    heads = ["mean", *(f"p{percent}" for percent in PERCENTILES), "max"]
    lines += ["", f"{'milliseconds':<32}" + "".join(f"{head:>10}" for head in heads)]
    named = LATENCY_NAMES | {"event_loop_lag_ms": "this client's event loop late", "sent_late_ms": "sent late"}
    figures = found | found["client"]
    lines += [
        f"{named[name]:<32}" + "".join(f"{figures[name][head]:>10.2f}" for head in heads)
        for name in named
        if figures.get(name)
    ]
    for kind, message in found["error_examples"].items():
        lines.append(f"\n{kind}, for example: {message}")
    return "\n".join(lines + [f"\nnote: {caveat}" for caveat in found["caveats"]])


def plot(path: Path, found: dict[str, Any], run: Run) -> None:
    """Draws the cumulative distributions of latencies, and open requests and throughput over time, into one PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    each = [latencies(outcome) for outcome in run.outcomes if outcome.error is None]
    curves = {
        "time to first token (ms)": [one.ttft for one in each if one.ttft is not None],
        "inter-token latency (ms)": [gap for one in each for gap in one.token_gaps],
        "end to end (ms)": [one.e2e for one in each],
    }
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    for axis, (name, values) in zip(axes.flat, curves.items(), strict=False):
        ordered = sorted(values)
        axis.step(ordered, [(place + 1) / len(ordered) for place in range(len(ordered))], where="post")
        axis.set(xlabel=name, ylabel="fraction of " + ("tokens" if "inter" in name else "answers"), ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    bins = timeline(run.outcomes, run.wall_s, NUM_BINS)
    left, right = axes[1, 1], axes[1, 1].twinx()
    left.step(bins["start_s"], bins["under_way"], where="post", color="tab:blue")
    left.set(xlabel="time (s)", ylim=(0, None))
    left.set_ylabel("requests under way", color="tab:blue")
    right.step(bins["start_s"], bins["tokens_per_s"], where="post", color="tab:orange")
    right.set_ylim(0, None)
    right.set_ylabel("tokens per second", color="tab:orange")
    figure.suptitle(f"{found['complete']} of {found['requests']} answers, {found['output_tokens_per_s']:.0f} tokens/s")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def rounded(value: Any) -> Any:
    """The value with all floats in it rounded to six significant digits."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    if isinstance(value, list):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
