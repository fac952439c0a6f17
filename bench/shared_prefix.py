"""Measures the gain of sharing a prefix: requests with one long common prefix, with and without the radix cache."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.loop import greedy, make_engine, random_prompt
from bench.optimum import optimum
from bench.report import Report
from jsg.engine.core import EngineCore
from jsg.prompt_ids import PromptIds
from jsg.types import Request

TARGET_SPEED_UP = ">= 5"
TARGET_HIT_RATE = ">= 0.96 of the optimum"


class Workload(NamedTuple):
    """Requests that share their first tokens."""

    num_requests: int = 64
    shared_len: int = 512
    own_len: int = 32
    output_len: int = 8

    def prompts(self, vocab_size: int) -> list[tuple[int, ...]]:
        """Random prompts, which are the same each time."""
        shared = random_prompt(-1, self.shared_len, vocab_size)
        return [shared + random_prompt(seed, self.own_len, vocab_size) for seed in range(self.num_requests)]

    def context_len(self) -> int:
        """The number of tokens of one request."""
        return self.shared_len + self.own_len + self.output_len


class Run(NamedTuple):
    """One pass over all requests."""

    cpu_s: float
    num_steps: int
    cached_tokens: int
    prompt_tokens: int


def measure_shared_prefix(
    report: Report, directory: Path, *, rounds: int, workload: Workload | None = None, **knobs: Any
) -> None:
    """Measures both engines in turns. Each run begins with an empty cache. Both engines have the options `knobs`."""
    workload = workload or Workload()
    knobs["context_length"] = workload.context_len()
    knobs["max_total_tokens"] = workload.num_requests * workload.context_len()
    engines = {
        "with the radix cache": make_engine(directory, **knobs),
        "with --disable-radix-cache": make_engine(directory, disable_radix_cache=True, **knobs),
    }
    prompts = workload.prompts(next(iter(engines.values())).info.vocab_size)
    runs: dict[str, list[Run]] = {name: [] for name in engines}
    for core in engines.values():
        run_all(core, prompts[:1], 2)
    for _ in range(rounds):
        for name, core in engines.items():
            runs[name].append(run_all(core, prompts, workload.output_len))
    for name, core in engines.items():
        core.close()
        report.add(
            f"{workload.num_requests} requests {name}",
            "s cpu",
            [run.cpu_s for run in runs[name]],
            steps=runs[name][-1].num_steps,
        )
    shared, unshared = runs.values()
    ratios = [slow.cpu_s / fast.cpu_s for slow, fast in zip(unshared, shared, strict=True)]
    report.add("throughput, shared / unshared", "x", ratios, target=TARGET_SPEED_UP, **workload._asdict())
    best = optimum(prompts).hit_rate
    rates = [run.cached_tokens / run.prompt_tokens for run in shared]
    report.add("hit rate", "fraction", rates, optimum=best, of_optimum=min(rates) / best, target=TARGET_HIT_RATE)


def run_all(core: EngineCore, prompts: Sequence[tuple[int, ...]], output_len: int) -> Run:
    """Sends all prompts at once to an engine with an empty cache, and steps until the last request has ended."""
    core.flush_cache()
    cpu, num_steps, cached, total = time.process_time(), 0, 0, 0
    for index, prompt in enumerate(prompts):
        core.add(Request(rid=str(index), input_ids=PromptIds.of(prompt), sampling=greedy(output_len)))
    while core.has_work:
        num_steps += 1
        for output in core.step():
            if output.finish is not None:
                cached, total = cached + output.cached_tokens, total + output.prompt_tokens
    return Run(time.process_time() - cpu, num_steps, cached, total)
