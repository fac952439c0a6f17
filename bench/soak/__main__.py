"""Runs a server under all kinds of requests for a long time: `python -m bench.soak --minutes 30 [--output FILE]`.

The server runs the embedded model with a pool so small that prefixes are evicted and requests retracted all the time.
A few clients stream, disconnect, abort, ask for two answers, send bad requests, and share prefixes, all by a seed. At
the end no answer may be wrong, no part of the pool may be lost, and neither process may have grown. Otherwise the exit
status is 1.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import itertools
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.report import Report
from bench.served import Served, served
from bench.serving.client import open_session
from bench.soak.client import LIMIT_S, Answer, Broken, Client
from bench.soak.memory import MIB, NUM_QUARTERS, Sample, Watch, minima, most_threads, theil_sen
from bench.soak.mix import SHARES, Mix, Task
from jsg.sources import EMBEDDED

POOL_TOKENS = 400  # one request has up to 268 tokens
RUNNING = 8
SHOW_TOOLS = """{%- if tools -%}
{{- '<|system|><tool_call>' + (tools | map(attribute='function.name') | join(' ')) + '</tool_call><|end|>' -}}
{%- endif -%}"""
"""The embedded model's chat template shows no tools. With this before it, the server takes them, in the Hermes form."""
OPTIONS = (
    *("--port", "0", "--deterministic", "--max-total-tokens", str(POOL_TOKENS)),
    *("--max-running-requests", str(RUNNING), "--schedule-conservativeness", "0.1"),
)
REPLAYED = 0.01  # fraction of the finished requests that is replayed; at least `MIN_REPLAYED` requests are
MIN_REPLAYED = 20
MAX_KEPT = 2000  # answers that are kept for the replay, so that they do not grow in number with time
WARM_UP_SHARE = 0.2
MAX_WARM_UP_S = 300.0
MAX_SLOPE_MIB_PER_HOUR = 1.0
MIN_MINUTES_FOR_SLOPE = 15  # in a shorter run, whatever is filled for the first time looks like growth
SETTLE_S = 1.0
LATE_THREADS = (os.cpu_count() or 1) + 2
"""The size of the front's largest pool of threads. A pool adds a thread only when work comes while all are busy, which
may be late. What is lost at requests has no such bound."""
WARM_UP_CLIENTS = 48  # this number of clients at once starts all threads and fills all tables
MAX_SHOWN = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Soak:
    """The options of a soak.

    Attributes:
        minutes: How long requests are sent.
        num_requests: The number of requests after which it ends earlier; 0 for no such end.
        clients: The number of clients at once.
        pause_s: Mean seconds that a client waits between two requests, so that the machine has time for others.
        seed: The seed of everything random.
        period_s: Seconds between two samples of the processes.
        bin_s: The length in seconds of the periods of which the least memory counts.
    """

    minutes: float = 30.0
    num_requests: int = 0
    clients: int = 8
    pause_s: float = 0.5
    seed: int = 0
    period_s: float = 2.0
    bin_s: float = 60.0


@dataclasses.dataclass(slots=True)
class Result:
    """The result of a soak.

    Attributes:
        problems: What is wrong, each in a sentence. The soak passes if there are none.
        counts: The number of sent requests by kind, and of those that ended by themselves.
        state: The engine's counters at the end.
        samples: What the processes used over time.
        num_replayed: The number of answers that were generated again and compared.
    """

    problems: list[str] = dataclasses.field(default_factory=list)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    state: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    num_replayed: int = 0


class Keeper:
    """A random sample of the finished requests, of bounded size (reservoir sampling)."""

    def __init__(self, seed: int):
        self.kept: list[tuple[Task, list[Answer]]] = []
        self.num_seen = 0
        self._rng = random.Random(seed)

    def add(self, task: Task, answers: list[Answer]) -> None:
        self.num_seen += 1
        if len(self.kept) < MAX_KEPT:
            self.kept.append((task, answers))
        elif (place := self._rng.randrange(self.num_seen)) < MAX_KEPT:
            self.kept[place] = (task, answers)

    def chosen(self) -> list[tuple[Task, list[Answer]]]:
        """The requests to replay."""
        count = max(MIN_REPLAYED, round(REPLAYED * self.num_seen))
        return self._rng.sample(self.kept, min(count, len(self.kept)))


async def soak(server: Served, knobs: Soak) -> Result:
    """Runs the mix against a server and checks everything except memory."""
    result, keeper = Result(), Keeper(knobs.seed)
    async with open_session(None) as session:
        client = Client(session, server.url)
        info = msgspec.json.decode(await client.get("/get_model_info"))
        mix = Mix(knobs.seed, info["max_request_tokens"], info["vocab_size"])
        watch = Watch(server, knobs.period_s)
        async with _running(watch.run()):
            await _send_all(client, mix, knobs, result, keeper)
        for task, answers in keeper.chosen():
            result.num_replayed += 1
            await _compare(client, task, answers, result)
        try:
            await _check_rest(client, info["max_total_tokens"], result)
        except Broken as broken:
            result.problems.append(f"after the last answer: {broken}")
    result.samples = watch.samples
    return result


async def _send_all(client: Client, mix: Mix, knobs: Soak, result: Result, keeper: Keeper) -> None:
    numbers = itertools.count()
    end_s = time.monotonic() + 60 * knobs.minutes

    async def one_client() -> None:
        while time.monotonic() < end_s:
            number = next(numbers)
            if number >= knobs.num_requests > 0:
                return
            task = mix.task(number)
            result.counts[task.kind] += 1
            try:
                answers = await client.run(task)
            except Broken as broken:
                result.problems.append(f"request {task.number} ({task.kind}, {task.path}): {broken}")
                answers = None
            if answers is not None:
                result.counts["finished"] += 1
                keeper.add(task, answers)
            await asyncio.sleep(random.Random(task.number).expovariate(1 / knobs.pause_s) if knobs.pause_s else 0)

    async with asyncio.TaskGroup() as group:
        for _ in range(knobs.clients):
            group.create_task(one_client())


async def _compare(client: Client, task: Task, answers: list[Answer], result: Result) -> None:
    """Repeats requests while no others run. Every token of their answers must be the same."""
    try:
        async with asyncio.timeout(LIMIT_S):
            again = await client.replay(task)
    except (Broken, TimeoutError) as broken:
        result.problems.append(f"replay of request {task.number}: {broken}")
        return
    if again != answers:
        where = [place for place, (one, two) in enumerate(zip(answers, again, strict=True)) if one != two]
        result.problems.append(
            f"replay of request {task.number} ({task.kind}, {task.path}) differs in answers {where}: "
            f"{[answers[place] for place in where]} against {[again[place] for place in where]}"
        )


async def _check_rest(client: Client, pool_tokens: int, result: Result) -> None:
    """Checks that no request runs or is held, and that every token of the pool is free or can be freed."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        result.state = msgspec.json.decode(await client.get("/get_server_info"))["internal_states"][0]
        held = {name: result.state[name] for name in ("num_running", "num_waiting") if result.state.get(name)}
        if not held or time.monotonic() > deadline:
            break
        await asyncio.sleep(SETTLE_S / 10)
    state = result.state
    held |= {name: state[name] for name in ("num_protected_tokens", "num_uncached_tokens") if state[name]}
    if held:
        result.problems.append(f"after the last answer the engine still holds {held}")
    if state["num_free_tokens"] + state["num_evictable_tokens"] != pool_tokens:
        result.problems.append(
            "{num_free_tokens} free + {num_evictable_tokens} evictable tokens are not the pool of ".format(**state)
            + str(pool_tokens)
        )
    gauges = gauges_of((await client.get("/metrics")).decode())
    if busy := {name: value for name, value in gauges.items() if value and re.search("running|waiting|queue", name)}:
        result.problems.append(f"after the last answer these gauges are not zero: {busy}")
    await client.flush_cache()
    after = msgspec.json.decode(await client.get("/get_server_info"))["internal_states"][0]
    if after["num_free_tokens"] != pool_tokens:
        result.problems.append(f"with an empty cache {after['num_free_tokens']} of {pool_tokens} tokens are free")


def gauges_of(exposition: str) -> dict[str, float]:
    """The name (with labels) and the value of each gauge in Prometheus' text format."""
    kinds = set(re.findall(r"^# TYPE (\S+) gauge$", exposition, re.MULTILINE))
    lines = re.findall(r"^([^#\s{]+)(\{.*\})? (\S+)$", exposition, re.MULTILINE)
    return {name + labels: float(value) for name, labels, value in lines if name in kinds}


@contextlib.asynccontextmanager
async def _running(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs the work in the background inside the `with`, and cancels it at the end."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def check_processes(knobs: Soak, before: Sample, after: Sample, samples: list[Sample]) -> Iterator[str]:
    """What has grown: memory by its slope, descriptors and threads by their number while nothing runs.

    Threads of pools may still begin. More threads than a pool has, or more of them in each quarter, are growth.
    """
    for process in before.usage:
        for name, allowed in (("num_fds", 0), ("num_threads", LATE_THREADS)):
            first, last = getattr(before.usage[process], name), getattr(after.usage[process], name)
            if last > first + allowed:
                yield (
                    f"{process}: {name} was {first} before and is {last} after, with no request under way; at most "
                    f"{allowed} more are due"
                )
        quarters = most_threads(after_warm_up(knobs, samples), process)
        if len(quarters) == NUM_QUARTERS and all(one < two for one, two in itertools.pairwise(quarters)):
            yield f"{process}: the number of threads grew in each quarter: {quarters}"
        slope = theil_sen(minima(after_warm_up(knobs, samples), process, knobs.bin_s))
        if slope is not None and knobs.minutes >= MIN_MINUTES_FOR_SLOPE and slope.per_hour >= MAX_SLOPE_MIB_PER_HOUR:
            yield (
                f"{process}: anonymous memory grows by {slope.per_hour:.2f} MiB/h "
                f"({slope.low:.2f} to {slope.high:.2f}); less than {MAX_SLOPE_MIB_PER_HOUR} is due"
            )


def after_warm_up(knobs: Soak, samples: list[Sample]) -> list[Sample]:
    """The samples after the warm-up."""
    start_s = min(MAX_WARM_UP_S, WARM_UP_SHARE * 60 * knobs.minutes)
    return [sample for sample in samples if sample.when_s >= start_s]


def run(knobs: Soak, log: Path | None = None) -> Result:
    """Starts a server, runs a short soak to warm everything up, then the soak that counts."""
    with tempfile.TemporaryDirectory(prefix="jsg-soak-") as folder, _served_with_tools(Path(folder), log) as server:
        watch = Watch(server, knobs.period_s)
        warm_up = Soak(minutes=min(knobs.minutes / 5, 1.0), clients=WARM_UP_CLIENTS, pause_s=0.0, seed=knobs.seed + 1)
        first = asyncio.run(soak(server, warm_up))
        time.sleep(SETTLE_S)
        before = watch.look()
        result = asyncio.run(soak(server, knobs))
        time.sleep(SETTLE_S)
        after = watch.look()
    result.problems = [*first.problems, *result.problems, *check_processes(knobs, before, after, result.samples)]
    if missing := [kind for kind in SHARES if not result.counts[kind]]:
        result.problems.append(f"nothing was sent of {', '.join(missing)}: the soak was too short")
    if not result.state.get("num_retracts"):
        result.problems.append("no request was retracted: the soak was too short")
    return result


def _served_with_tools(folder: Path, log: Path | None) -> contextlib.AbstractContextManager[Served]:
    """A server of the embedded model, whose chat template shows tools. The folder gets a copy of the model."""
    model = shutil.copytree(EMBEDDED["tiny"], folder / "model")
    config = msgspec.json.decode((model / "tokenizer_config.json").read_bytes())
    config["chat_template"] = SHOW_TOOLS + config["chat_template"]
    (model / "tokenizer_config.json").write_bytes(msgspec.json.encode(config))
    return served(("serve", str(model), *OPTIONS), log=log)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in dataclasses.fields(Soak):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, help=f"default {field.default}")
    parser.add_argument("--log", type=Path, help="file for the server's standard error")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    knobs = Soak(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Soak)})
    report = Report("bench.soak", arguments, options.output, model="tiny", server=" ".join(OPTIONS))
    result = run(knobs, options.log)
    add_figures(report, knobs, result)
    report.close()
    for problem in result.problems[:MAX_SHOWN]:
        print(f"PROBLEM {problem}")
    print(f"{len(result.problems)} problems")
    return 1 if result.problems else 0


def add_figures(report: Report, knobs: Soak, result: Result) -> None:
    """Adds the whole result to the report, as figures."""
    total = sum(result.counts[kind] for kind in SHARES)
    report.add("requests", "count", [total], **{str(kind): count for kind, count in result.counts.items()})
    report.add("answers that were wrong, and what else failed", "count", [len(result.problems)], target=0)
    report.add("finished answers made again alone", "count", [result.num_replayed])
    for name in ("num_retracts", "num_evicted_tokens", "generated_tokens", "num_compiled"):
        if name in result.state:
            report.add(f"engine: {name}", "count", [result.state[name]])
    for process in result.samples[0].usage:
        points = minima(after_warm_up(knobs, result.samples), process, knobs.bin_s)
        if (slope := theil_sen(points)) is not None:
            low_high = f"{slope.low:.2f} to {slope.high:.2f}"
            report.add(
                f"{process}: slope of anonymous memory", "MiB/h", [slope.per_hour], interval=low_high, target="< 1"
            )
            report.add(f"{process}: least anonymous memory of each stretch", "MiB", [held for _, held in points])
        held = [sample.usage[process].anonymous / MIB for sample in result.samples]
        report.add(f"{process}: anonymous memory, every {knobs.period_s:g} s", "MiB", held)
        for name in ("num_fds", "num_threads"):
            report.add(f"{process}: {name}", "count", [getattr(s.usage[process], name) for s in result.samples])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
