"""Measures the host's time for scheduling: `python -m bench.sched --output sched.json`.

There is no device and no model. Batches are planned, packed and answered with invented tokens. Times are processor time
of this thread, so a busy machine disturbs them less.
"""

import argparse
import dataclasses
import itertools
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bench.report import Report
from jsg.cache.allocator import PageAllocator
from jsg.cache.radix import RadixCache
from jsg.cache.tree_log import STOP, TreeLog
from jsg.cache.windows import make_allocator
from jsg.config import POLICIES
from jsg.engine.child.free_memory import collect_seldom
from jsg.engine.device import packing
from jsg.engine.device.step import SAMPLING_COLUMNS
from jsg.engine.drafter import Drafter
from jsg.engine.front.tree_copy import TreeCopy
from jsg.engine.grammars.constraints import Constraints
from jsg.prompt_ids import PromptIds
from jsg.sched.batch import Batch
from jsg.sched.buckets import BucketKey, make_buckets
from jsg.sched.groups import PrefixGrouping, find_groups
from jsg.sched.scheduler import Scheduler, SchedulerConfig, StepResult
from jsg.server.native.radix_view import View
from jsg.types import Request, SamplingParams

VOCAB = 50_000
NUM_RUNNING = 256
NUM_WAITING = 10_000
NUM_LEAVES = 10_000
NUM_PAGES = 2_000_000
NUM_OF_LARGE_TREE = 100_000
PERIOD = 40
NUM_EDGES = 2000
"""The size of the tree whose memory is measured: this number of edges of 32 tokens, each with two such edges below."""


@dataclasses.dataclass
class Host:
    """A scheduler with its cache, and a device that answers at once with any token."""

    scheduler: Scheduler
    allocator: PageAllocator
    cache: RadixCache
    plan_ms: list[float] = dataclasses.field(default_factory=list)
    pack_ms: list[float] = dataclasses.field(default_factory=list)
    commit_ms: list[float] = dataclasses.field(default_factory=list)

    def take_pages(self, count: int) -> np.ndarray:
        """Pages for the part that is measured."""
        pages = self.allocator.allocate(count)
        assert pages is not None, "the pool is larger than anything that is measured"
        return pages

    def step(self) -> Batch:
        """Makes a step (plan, pack, commit) and records the time of each part."""
        table = self.scheduler.table
        constants = np.zeros((len(table.pages), SAMPLING_COLUMNS - 2), np.int32)
        start = time.thread_time_ns()
        batch = self.scheduler.plan()
        planned = time.thread_time_ns()
        assert batch is not None, "there is always something to do"
        packing.pack_forward(batch, batch.key, table.pages, table.page_size)
        packing.pack_sampling(batch, batch.key, constants)
        packed = time.thread_time_ns()
        self.scheduler.commit(batch, StepResult([7] * batch.key.num_rows))
        committed = time.thread_time_ns()
        self.plan_ms.append((planned - start) / 1e6)
        self.pack_ms.append((packed - planned) / 1e6)
        self.commit_ms.append((committed - packed) / 1e6)
        return batch


def make_host(
    policy: str = "lpm",
    *,
    page_size: int = 1,
    chunk: int = 8192,
    context_length: int = 8192,
    num_pages: int | None = None,
    num_states: int | None = None,
) -> Host:
    """The host side of an engine with the sizes of a large server, and for a hybrid with so many states of prefixes."""
    slots = None if num_states is None else (NUM_RUNNING, num_states)
    total = (num_pages or NUM_PAGES // page_size) + 1
    allocator = make_allocator({None: total}, page_size, has_layers=True, num_slots=slots)
    cache = RadixCache(page_size, allocator)
    config = SchedulerConfig(
        context_length=context_length,
        vocab_size=VOCAB,
        eos_token_ids=frozenset({VOCAB - 1}),
        buckets=make_buckets(NUM_RUNNING, chunk),
        max_running=NUM_RUNNING,
        policy=policy,
        max_queued=10 * NUM_WAITING,
    )
    return Host(Scheduler(config, allocator, cache), allocator, cache)


def request(rid: str, tokens: np.ndarray, max_new: int) -> Request:
    sampling = SamplingParams(max_new_tokens=max_new, ignore_eos=True)
    return Request(rid=rid, input_ids=PromptIds.of(tokens.tolist()), sampling=sampling)


def milliseconds(run: Callable[[], object]) -> float:
    """The processor time of this thread in one call."""
    start = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - start) / 1e6


def percentile_99(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=100)[98]


# Waiting.


def prompts(rng: np.random.Generator, count: int, num_shared: int, num_own: int) -> list[np.ndarray]:
    """Prompts of twenty families. Those of one family share a prefix."""
    families = rng.integers(0, VOCAB, (20, num_shared)).astype(np.int32)
    own = rng.integers(0, VOCAB, (count, num_own)).astype(np.int32)
    return [np.concatenate([families[i % 20], tail]) for i, tail in enumerate(own)]


def time_waiting(report: Report, policy: str, num_steps: int) -> None:
    """Measures steps of a full server with many and with few waiting requests. The difference is the queue's cost.

    In each step one request ends, one is admitted, one arrives, and the tree changes.
    """
    plans = {}
    for num_waiting in (100, NUM_WAITING):
        rng = np.random.default_rng(0)
        host = make_host(policy)
        supply = iter(prompts(rng, 2 * NUM_RUNNING + num_waiting + 2 * num_steps, 500, 200))
        rids = (f"r{number}" for number in itertools.count())
        lengths = itertools.cycle(range(200, NUM_RUNNING + 200))
        for _ in range(NUM_RUNNING + num_waiting):
            host.scheduler.add(request(next(rids), next(supply), next(lengths)))
        for _ in range(40):
            host.step()
        host.plan_ms.clear()
        adds = []
        for _ in range(num_steps):
            new = request(next(rids), next(supply), next(lengths))
            adds.append(milliseconds(lambda host=host, new=new: host.scheduler.add(new)))
            host.step()
        plans[num_waiting] = host.plan_ms
        facts = {"p99": percentile_99(host.plan_ms), "mean": statistics.fmean(host.plan_ms)}
        report.add(f"plan, {policy}, {num_waiting} waiting", "ms", host.plan_ms, **facts)
        report.add(f"add, {policy}, {num_waiting} waiting", "ms", adds, p99=percentile_99(adds))
    more = statistics.fmean(plans[NUM_WAITING]) - statistics.fmean(plans[100])
    report.add(f"plan, {policy}, what 9 900 more waiting cost", "ms", [more], target=1.0)


def time_reorder(report: Report, policy: str, num_samples: int) -> None:
    """Measures an insert that lengthens the cached prefix of all waiting requests, their new order, and the undoing."""
    rng = np.random.default_rng(0)
    host = make_host(policy)
    shared = rng.integers(0, VOCAB, 1000).astype(np.int32)
    for number, tail in enumerate(rng.integers(0, VOCAB, (NUM_WAITING, 100)).astype(np.int32)):
        host.scheduler.add(request(f"r{number}", np.concatenate([shared, tail]), 10))
    waiting = host.scheduler.waiting
    inserts, orders, evictions = [], [], []
    for _ in range(num_samples):
        pages = host.take_pages(len(shared))
        inserts.append(milliseconds(lambda pages=pages: host.cache.insert(shared, pages)))
        orders.append(milliseconds(waiting.first))
        evictions.append(milliseconds(host.cache.reset))
    report.add(f"insert that {NUM_WAITING} watches see, {policy}", "ms", inserts)
    report.add(f"order of {NUM_WAITING} after it, {policy}", "ms", orders)
    both = [insert + order for insert, order in zip(inserts, orders, strict=True)]
    report.add(f"full re-order of {NUM_WAITING}: both, {policy}", "ms", both, target=50.0)
    report.add(f"evict what {NUM_WAITING} watches see, {policy}", "ms", evictions)


# The tree.


def time_tree(report: Report, num_samples: int) -> None:
    """Measures match and insert of a prompt of 10 000 tokens: nothing cached, or all cached in edges of 32 tokens."""
    rng = np.random.default_rng(0)
    host = make_host()
    cold = []
    for _ in range(num_samples):
        prompt = rng.integers(0, VOCAB, 10_000).astype(np.int32)
        pages = host.take_pages(len(prompt))
        cold.append(milliseconds(lambda p=prompt, q=pages: (host.cache.match(p), host.cache.insert(p, q))))
        host.cache.reset()
    report.add("match + insert of 10 000 tokens, cold", "ms", cold, target=1.0, p99=percentile_99(cold))
    prompt, pages = rng.integers(0, VOCAB, 10_000).astype(np.int32), host.take_pages(10_000)
    for end in range(32, 10_001, 32):
        host.cache.insert(prompt[:end], pages[:end])
    host.cache.insert(prompt, pages)
    warm = [milliseconds(lambda: (host.cache.match(prompt), host.cache.insert(prompt, pages))) for _ in cold]
    report.add("match + insert of 10 000 tokens, in edges of 32", "ms", warm, target=1.0, p99=percentile_99(warm))


def time_evictions(report: Report, num_samples: int) -> None:
    """Measures eviction of many leaves at once below one prefix, and of the edges of one prompt one by one."""
    rng = np.random.default_rng(0)
    shared = rng.integers(0, VOCAB, 1000).astype(np.int32)
    at_once, one_by_one = [], []
    for _ in range(num_samples):
        host = make_host()
        for tail in rng.integers(0, VOCAB, (NUM_LEAVES, 32)).astype(np.int32):
            pages = host.take_pages(1032)
            result = host.cache.insert(np.concatenate([shared, tail]), pages)
            host.allocator.free(pages[: result.num_existing])
        at_once.append(milliseconds(host.cache.reset))
        prompt, pages = rng.integers(0, VOCAB, 10_000).astype(np.int32), host.take_pages(10_000)
        for end in (*range(32, 10_001, 32), 10_000):
            host.cache.insert(prompt[:end], pages[:end])
        num_edges = host.cache.num_nodes
        spent = milliseconds(lambda host=host, count=num_edges: [host.cache.evict(1) for _ in range(count)])
        one_by_one.append(spent / num_edges)
    report.add(f"eviction of {NUM_LEAVES} leaves below one prefix of 1000 tokens", "ms", at_once)
    report.add("eviction of one edge of a prompt of 10 000 tokens, in edges of 32", "ms", one_by_one)


# Those who look at the tree.


class Looker:
    """Somebody who looks at a tree, and the time that this takes the engine."""

    def __init__(self, cache: RadixCache) -> None:
        self.copy = TreeCopy()
        self.look_ms: list[float] = []
        self.take_ms: list[float] = []
        self._log = TreeLog(cache)
        self._encoder = msgspec.msgpack.Encoder()

    def look(self) -> float:
        """Looks once; returns the milliseconds of the engine."""
        start = time.thread_time_ns()
        sent = self._encoder.encode(self._log.look(self.copy.cursor, with_tokens=False) | {"pool": {}})
        self.look_ms.append((time.thread_time_ns() - start) / 1e6)
        self.take_ms.append(milliseconds(lambda: self.copy.take(msgspec.msgpack.decode(sent))))
        return self.look_ms[-1]

    def look_at_all(self) -> float:
        """Looks until the copy is whole."""
        spent = self.look()
        while not self.copy.is_whole:
            spent += self.look()
        return spent

    def stop(self) -> None:
        """Looks no more."""
        self._log.look(STOP, with_tokens=False)


def time_watching(report: Report, num_rounds: int) -> None:
    """Measures steps with somebody who looks at the tree after every tenth, and in turns the same steps without.

    In each step one request ends, one is admitted and one arrives, and the tree has thousands of nodes. A look comes
    every 100 ms, so this is for steps of 10 ms. There is no device: the difference counts, and not the ratio.
    """
    rng = np.random.default_rng(0)
    host = make_host()
    supply = iter(prompts(rng, NUM_RUNNING + 100 * (1 + 2 * num_rounds), 500, 50))
    lengths = itertools.cycle(range(100, NUM_RUNNING + 100))
    rids = (f"r{number}" for number in itertools.count())
    looker = Looker(host.cache)

    def steps(*, is_watched: bool) -> float:
        spent = 0.0
        for number in range(100):
            host.scheduler.add(request(next(rids), next(supply), next(lengths)))
            spent += milliseconds(host.step)
            if is_watched and number % 10 == 9:
                spent += looker.look()
        return spent / 100

    def both() -> tuple[float, float]:
        alone = steps(is_watched=False)
        looker.look_at_all()
        looker.look_ms.clear()
        watched = steps(is_watched=True)
        looks.extend(looker.look_ms)
        looker.stop()
        return alone, watched

    looks: list[float] = []
    for _ in range(NUM_RUNNING):
        host.scheduler.add(request(next(rids), next(supply), next(lengths)))
    steps(is_watched=False)
    alone, watched = zip(*(both() for _ in range(num_rounds)), strict=True)
    more = [one - other for one, other in zip(watched, alone, strict=True)]
    report.add("host part of a step, nobody looks", "ms", alone, nodes=host.cache.num_nodes)
    report.add("host part of a step, somebody looks", "ms", watched)
    report.add("what looking costs a step of 10 ms", "ms", more, target=0.1)
    report.add("one look", "ms", looks, most=max(looks))


def time_large_tree(report: Report, num_samples: int) -> None:
    """Measures looks at a tree of 100 000 nodes until the copy is whole, and what the front makes of the copy."""
    rng = np.random.default_rng(0)
    host = make_host()
    upper = rng.integers(0, VOCAB, (1000, 8)).astype(np.int32)
    for number, tail in enumerate(rng.integers(0, VOCAB, (NUM_OF_LARGE_TREE - 1000, 8)).astype(np.int32)):
        pages = host.take_pages(16)
        result = host.cache.insert(np.concatenate([upper[number % 1000], tail]), pages)
        host.allocator.free(pages[: result.num_existing])
    looker, wholes, draws = Looker(host.cache), [], []
    for _ in range(num_samples):
        wholes.append(looker.look_at_all())
        looker.stop()
        nodes = [*looker.copy.nodes.values()]
        draws.append(milliseconds(lambda nodes=nodes: View(2000, None, None).draw(nodes, time.time())))
    looks, takes = looker.look_ms, looker.take_ms
    size = f"{host.cache.num_nodes} nodes"
    report.add(f"one look of the walk, {size}", "ms", looks, p99=percentile_99(looks), most=max(looks))
    report.add(f"all looks of the walk, {size}", "ms", wholes)
    report.add(f"the front takes one look, {size}", "ms", takes)
    report.add(f"the front folds it to 2000 nodes, {size}", "ms", draws)


def measure_memory(report: Report) -> None:
    """Measures host bytes for each cached token if an edge has 32 tokens on average."""
    rng = np.random.default_rng(0)
    host = make_host()
    halves = rng.integers(0, VOCAB, (NUM_EDGES, 3, 32)).astype(np.int32)
    tracemalloc.start()
    for upper, *lowers in halves:
        for lower in lowers:
            pages = host.take_pages(64)
            result = host.cache.insert(np.concatenate([upper, lower]), pages)
            host.allocator.free(pages[: result.num_existing])
    used, stats = tracemalloc.get_traced_memory()[0], host.cache.stats()
    tracemalloc.stop()
    edge = stats.num_cached_tokens / stats.num_nodes
    report.add("host memory per cached token", "bytes", [used / stats.num_cached_tokens], target=32, mean_edge=edge)


# The step.


def time_decode(report: Report, page_size: int, num_steps: int) -> None:
    """Measures decode steps of as many requests as can run."""
    rng = np.random.default_rng(0)
    host = make_host(page_size=page_size)
    for number in range(NUM_RUNNING):
        host.scheduler.add(request(f"r{number}", rng.integers(0, VOCAB, 300), num_steps + 50))
    while len(host.scheduler.waiting) or host.step().num_singles < NUM_RUNNING:
        host.step()
    for samples in (host.plan_ms, host.pack_ms, host.commit_ms):
        samples.clear()
    for _ in range(num_steps):
        host.step()
    parts = {"plan": host.plan_ms, "pack": host.pack_ms, "commit": host.commit_ms}
    for name, samples in parts.items():
        report.add(f"decode of {NUM_RUNNING}, page size {page_size}: {name}", "ms", samples, p99=percentile_99(samples))
    total = [sum(step) for step in zip(*parts.values(), strict=True)]
    report.add(
        f"decode of {NUM_RUNNING}, page size {page_size}: together", "ms", total, target=1.5, p99=percentile_99(total)
    )


def time_drafts(report: Report, text: str, num_steps: int) -> None:
    """Measures what drafts add to decode steps of as many requests as can run.

    First no draft can gain time, since steps are short beside what the host does for drafts. Then each could; so every
    text is looked at in every step.
    """
    for case, seconds in (("where they cannot gain", 5e-3), ("where they can", 0.1)):
        host = make_host()
        gate, eos = host.scheduler.gate, frozenset({VOCAB - 1})
        gate.is_wanted = True
        for key in [each for each in gate.to_measure if isinstance(each, BucketKey)]:
            gate.note(key, seconds * (1 + 0.01 * key.num_rows / NUM_RUNNING))
        no_tokenizer: Any = None  # which only grammars read
        grammars = Constraints(no_tokenizer, VOCAB, eos, "draft")
        drafter = Drafter(gate, grammars, vocab_size=VOCAB, eos_token_ids=eos, page_size=1, is_on=True)
        samples, waits = _draft(host.scheduler, drafter, text, num_steps)
        facts = {"most": max(samples), "steps_with_drafts": waits}
        report.add(f"drafts for {NUM_RUNNING}, {text}, {case}", "ms", samples, **facts)


def _draft(scheduler: Scheduler, drafter: Drafter, text: str, num_steps: int) -> tuple[list[float], int]:
    """The milliseconds of steps in which a drafter looks at all texts, and how many of them had drafts."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        if text == "prose":  # as often as words are, so that short repeats are found, which are wrong
            return np.minimum(rng.zipf(1.3, count), VOCAB - 2).astype(np.int32)
        return np.resize(rng.integers(0, VOCAB, PERIOD), count).astype(np.int32)

    for number in range(NUM_RUNNING):
        scheduler.add(request(f"r{number}", tokens(700), num_steps + 50))
    max_rows = make_buckets(NUM_RUNNING, 8192).drafts[-1].num_rows
    samples, waits = list[float](), list[bool]()
    while len(waits) < num_steps:
        batch = scheduler.plan()
        assert batch is not None, "there is always something to do"
        said = [int(each.running.tokens[each.running.num_known - PERIOD]) for each in batch.entries]
        said = tokens(len(said)).tolist() if text == "prose" else said
        result = StepResult(said + [0] * (batch.key.num_rows - len(said)))
        if batch.num_singles < NUM_RUNNING:  # prompts
            scheduler.commit(batch, result)
            continue
        before = milliseconds(lambda: waits.append(drafter.must_know_tokens(scheduler.running, max_rows)))
        if waits[-1]:
            scheduler.commit(batch, result)
        samples.append(before + milliseconds(lambda: drafter.proposals(scheduler.running, max_rows)))
        if not waits[-1]:  # steps overlap
            scheduler.commit(batch, result)
    return samples, sum(waits)


def time_groups(report: Report, num_families: int, num_samples: int) -> None:
    """Measures the groups of decoding requests of several families: found anew, and kept while the requests stay."""
    rng = np.random.default_rng(0)
    host = make_host()
    families = rng.integers(0, VOCAB, (num_families, 1000)).astype(np.int32)
    for number, own in enumerate(rng.integers(0, VOCAB, (NUM_RUNNING, 300)).astype(np.int32)):
        host.scheduler.add(request(f"r{number}", np.concatenate([families[number % num_families], own]), 500))
    while len(host.scheduler.waiting) or host.step().num_singles < NUM_RUNNING:
        host.step()
    places = [running.place for running in host.scheduler.running if running.place is not None]
    grouping = PrefixGrouping(1)
    num_groups = len(grouping.update(list(places)))
    found = [milliseconds(lambda: find_groups(places, 1)) for _ in range(num_samples)]
    kept = [milliseconds(lambda again=list(places): grouping.update(again)) for _ in range(num_samples)]
    name = f"groups of {NUM_RUNNING} requests in {num_families} families"
    report.add(f"{name}: found", "ms", found, target=0.2, p99=percentile_99(found), groups=num_groups)
    report.add(f"{name}: kept", "ms", kept, p99=percentile_99(kept))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sched", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    parser.add_argument("--steps", type=int, default=300, help="number of steps or calls for each figure")
    options = parser.parse_args(arguments)
    report = Report("bench.sched", arguments, options.output)
    collect_seldom()  # as in an engine
    for page_size in (1, 16):
        time_decode(report, page_size, options.steps)
    for text in ("prose", "copies"):
        time_drafts(report, text, options.steps)
    for num_families in (1, 20, 256):
        time_groups(report, num_families, options.steps)
    time_tree(report, max(options.steps // 3, 2))
    time_evictions(report, max(options.steps // 30, 2))
    time_watching(report, max(options.steps // 15, 2))
    time_large_tree(report, max(options.steps // 60, 2))
    measure_memory(report)
    for policy in POLICIES:
        time_waiting(report, policy, options.steps)
        time_reorder(report, policy, max(options.steps // 30, 2))
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
