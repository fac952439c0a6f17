"""Plays loads through the scheduler without a device: what a model with states finds cached, and one without."""

from collections.abc import Iterable

from bench.hybrid.loads import LOADS, Wave, shrinking
from bench.report import Report
from bench.sched import make_host
from jsg.prompt_ids import PromptIds
from jsg.sched.scheduler import Scheduler, StepResult
from jsg.types import Request, SamplingParams

BUDGETS = (16, 64, 256)
NUM_REQUESTS = 64
SHRINKING = (1600, 1500)
HIT = 0.9
"""A request hits if it finds this part of the prefix that it shares with all requests."""

Found = list[tuple[int, int]]
"""Of each request the tokens of its prompt, and how many of them were cached."""


def play(waves: Iterable[Wave], num_states: int | None) -> Found:
    """Plays a load. A hold ends with the wave after it.

    Args:
        waves: The load.
        num_states: The states of prefixes that the cache may keep; None for a model without states.
    """
    scheduler = make_host(num_states=num_states).scheduler
    found: Found = []
    for number, wave in enumerate(waves):
        over = [*scheduler.holds]
        found += _play_wave(scheduler, wave, number)
        for rid in over:
            scheduler.abort(rid)
        scheduler.take_finished()
    return found


def _play_wave(scheduler: Scheduler, wave: Wave, number: int) -> Found:
    answers = {f"{number}-{index}": asked.answer for index, asked in enumerate(wave)}
    for rid, asked in zip(answers, wave, strict=True):
        request = Request(
            rid=rid,
            input_ids=PromptIds.of(asked.prompt.tolist()),
            sampling=SamplingParams(max_new_tokens=len(asked.answer)),
            snapshot_at=asked.snapshot_at,
            turn_end=asked.turn_end,
            hold=asked.hold,
        )
        scheduler.add(request)
    found: dict[str, tuple[int, int]] = {}
    while (batch := scheduler.plan()) is not None:
        tokens = [0] * batch.key.num_rows
        for entry, row in zip(batch.entries, batch.first_rows, strict=True):
            if entry.samples:
                tokens[row] = int(answers[entry.running.request.rid][entry.output_index])
        for output in scheduler.commit(batch, StepResult(tokens)):
            found.setdefault(output.rid, (output.prompt_tokens, output.cached_tokens))
        scheduler.table.check_integrity()
    return [*found.values()]


def hit_rate(found: Found) -> float:
    """The part of all prompt tokens that was cached."""
    return sum(cached for _, cached in found) / sum(length for length, _ in found)


def measure_hits(report: Report) -> None:
    """Reports for each load the hit rate of a model without states, and with so many states as a part of it."""
    for name, (load, least, wanted) in LOADS.items():
        best = hit_rate(play(load(), None))
        report.add(f"hit rate, {name}: no states needed", "fraction", [best])
        for budget in BUDGETS:
            rate = hit_rate(play(load(), budget))
            facts = {"target": f">= {wanted}"} if budget == least else {}
            report.add(f"  of it with {budget} states", "x", [rate / best], load=name, hit_rate=rate, **facts)


def measure_shrinking(report: Report) -> None:
    """Reports how many requests hit if a prefix is shared, and then only the beginning of it (vLLM's issue 45238)."""
    for budget in (None, BUDGETS[0]):
        found = play(shrinking(SHRINKING, 2200, NUM_REQUESTS), budget)
        for prefix, first in zip(SHRINKING, (0, NUM_REQUESTS), strict=True):
            hits = sum(cached >= HIT * prefix for _, cached in found[first : first + NUM_REQUESTS])
            facts = {"states": "not needed"} if budget is None else {"states": budget, "target": ">= 62"}
            report.add(f"hits of 64, {prefix} of 2200 shared", "requests", [hits], **facts)
