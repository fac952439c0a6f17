"""Measures one engine in this Python: `python -m bench.constrained.measure ENGINE`.

The work comes on stdin, and figures go to stdout. Times are CPU time of the calling thread, without the cost of reading
the clock.
"""

import base64
import dataclasses
import gc
import importlib.metadata
import json
import sys
import time
from typing import Any

from bench.constrained.cases import Case
from bench.constrained.engines import ENGINES, Adapter, Unsupported

COMPILES = 5
WARM_PASSES = 5


def clock_cost_us() -> float:
    """The time between two readings of the clock in a row."""
    shown = sorted(-(time.thread_time_ns() - time.thread_time_ns()) for _ in range(2000))
    return shown[len(shown) // 2] / 1000


def measure(adapter: Adapter, case: Case, tokens: list[int], overhead_us: float) -> dict[str, Any]:
    """Compiles several times, then walks the document: the first pass is cold, the others are warm."""
    compile_ms = []
    compiled: Any = None
    for _ in range(COMPILES):
        started = time.thread_time_ns()
        compiled = adapter.compile(case)
        compile_ms.append((time.thread_time_ns() - started) / 1e6)
        if sum(compile_ms) > 10_000:
            break
    passes = []
    for _ in range(1 + WARM_PASSES):
        matcher, fills, accepts = adapter.matcher(compiled), [], []
        for token in tokens:
            started = time.thread_time_ns()
            adapter.fill(matcher)
            fills.append((time.thread_time_ns() - started) / 1000 - overhead_us)
            if not adapter.is_allowed(token):
                raise Unsupported(f"token {token} of the document is not allowed")
            started = time.thread_time_ns()
            adapter.accept(matcher, token)
            accepts.append((time.thread_time_ns() - started) / 1000 - overhead_us)
        passes.append((fills, accepts))
        if sum(fills) > 5e6:
            break
    warm = passes[1:] or passes
    return {
        "compile_ms": compile_ms,
        "cold_us": passes[0][0],
        "warm_us": [us for fills, _ in warm for us in fills],
        "accept_us": [us for _, accepts in warm for us in accepts],
    }


def main() -> None:
    engine = sys.argv[1]
    work = json.load(sys.stdin)
    started = time.process_time()
    vocabulary = [base64.b64decode(token) for token in work["tokens"]]
    adapter = ENGINES[engine](vocabulary, work["special_ids"], work["eos_id"])
    figures: dict[str, Any] = {"setup_s": time.process_time() - started, "cases": {}}
    figures["version"] = importlib.metadata.version(engine)
    warm_up = Case("warm-up", "regex", "[a-z]+", "")
    adapter.fill(
        adapter.matcher(adapter.compile(warm_up))
    )  # so that loading and compiling at the very first use is not measured
    overhead_us = clock_cost_us()
    for entry in work["cases"]:
        case = Case(**{field.name: entry[field.name] for field in dataclasses.fields(Case)})
        gc.collect()
        try:
            figures["cases"][case.name] = measure(adapter, case, entry["token_ids"], overhead_us)
        except Exception as error:  # one engine's refusal must not end the comparison
            figures["cases"][case.name] = {"refused": f"{type(error).__name__}: {error}"[:200]}
        print(json.dumps({"case": case.name, **figures["cases"][case.name]}), flush=True)
    print(json.dumps({"done": {k: v for k, v in figures.items() if k != "cases"}}), flush=True)


if __name__ == "__main__":
    main()
