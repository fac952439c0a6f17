"""Time per token over real schemas: the development sample of MaskBench, which lies outside the project.

Every schema is compiled anew, with flexible white space and free property order, so all of its masks are cold. Every
valid instance is read, as `json.dumps` writes it and in the tokens that the tokenizer makes of it. The time of a token
is that of its mask and of accepting it: CPU time of one thread, without the cost of reading the clock. None of the data
is written anywhere.
"""

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.constrained.measure import clock_cost_us
from bench.report import Report

PERCENTILES = (50, 90, 99, 99.9)
NUM_WORST = 12


class Token(NamedTuple):
    """One token of one instance: its time, and its place in the instance."""

    us: float
    schema: str
    place: int
    text: str


class Totals:
    """The results of all schemas."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.compile_ms: list[float] = []
        self.first_us: list[float] = []
        self.num_refused = 0
        self.num_instances = 0
        self.num_rejected = 0
        self.failed: list[str] = []
        """Schemas for which a token needed more steps or heads than are allowed."""


def run(
    data: Path,
    vocabulary: Any,
    encode: Callable[[str], list[int]],
    report: Report,
    share: int = 1,
    has_masks: bool = True,
) -> Totals:
    """Reads every `share`-th schema of the sample and reports the percentiles; with `has_masks` the instances too.

    As in a grammar process, which compiles one schema at a time, there are warm tables of characters and no collections
    of garbage while a schema is compiled.
    """
    from jsg.constrained.compiler import warm

    totals, overhead_us = Totals(), clock_cost_us()
    warm()
    gc.disable()
    gc.freeze()
    with (data / "maskbench-dev.jsonl").open(encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            if number % share == 0:
                entry = json.loads(line)
                read_schema(entry if has_masks else entry | {"tests": []}, vocabulary, encode, totals, overhead_us)
    gc.enable()
    _report(totals, report)
    return totals


def read_schema(
    entry: dict[str, Any], vocabulary: Any, encode: Callable[[str], list[int]], totals: Totals, overhead_us: float
) -> None:
    """Compiles one schema and reads its valid instances."""
    from jsg.constrained.compiler import compile_grammar
    from jsg.errors import GrammarError
    from jsg.types import GrammarSpec

    spec = GrammarSpec("json_schema", json.dumps(entry["schema"]), "flexible", "free", "open")
    gc.collect()
    started = time.thread_time_ns()
    try:
        grammar = compile_grammar(spec, vocabulary)
    except GrammarError:
        totals.num_refused += 1
        return
    totals.compile_ms.append((time.thread_time_ns() - started) / 1e6)
    mask = np.zeros(vocabulary.num_words, np.uint32)
    is_first = True
    for test in entry["tests"]:
        if not test["valid"]:
            continue
        totals.num_instances += 1
        masker, is_rejected = grammar.new_masker(), False
        for place, token in enumerate(encode(json.dumps(test["data"], ensure_ascii=False))):
            started = time.thread_time_ns()
            try:
                masker.fill_mask(mask)
                is_rejected = not masker.accept(token)
            except GrammarError as error:
                totals.failed.append(f"{entry['name']}: {error}")
                is_rejected = True
            us = (time.thread_time_ns() - started) / 1000 - overhead_us
            totals.tokens.append(Token(us, entry["name"], place, vocabulary.text_of(token).decode(errors="replace")))
            if is_first:
                totals.first_us.append(us)
                is_first = False
            if is_rejected:
                break
        totals.num_rejected += is_rejected or not masker.is_complete()


def _report(totals: Totals, report: Report) -> None:
    counts = {
        "schemas": len(totals.compile_ms),
        "refused": totals.num_refused,
        "instances": totals.num_instances,
        "rejected": totals.num_rejected,
        "failed": len(totals.failed),
    }
    us = np.array([token.us for token in totals.tokens])
    _add(report, "maskbench-dev: token, cold", "us", us, counts | {"target_p99.9": 2000.0})
    _add(report, "maskbench-dev: first token", "us", np.array(totals.first_us), {})
    _add(report, "maskbench-dev: compile", "ms", np.array(totals.compile_ms), {})
    for token in sorted(totals.tokens, reverse=True)[:NUM_WORST]:
        print(f"  {token.us:10.0f} us  {token.schema} at {token.place}: {token.text!r}")
    for name in totals.failed[:NUM_WORST]:
        print(f"  failed: {name}")


def _add(report: Report, name: str, unit: str, samples: np.ndarray, facts: dict[str, Any]) -> None:
    if samples.size:
        found = {f"p{rank:g}": float(np.percentile(samples, rank)) for rank in PERCENTILES}
        found |= {"max": float(samples.max()), "mean": float(samples.mean()), "count": int(samples.size)}
        report.add(name, unit, [found["p50"]], **found, **facts)
