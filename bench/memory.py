"""Measures the memory of `jsg serve` on a CPU beside its weights and its KV pool, after traffic.

    python -m bench.memory [--dtype bfloat16] [--output FILE] [-- OPTIONS]

The model is the 100M shape of `bench.peers`, with the same pool. The server gets some of the workloads of that bench,
32 prompts at a time, long prompts and JSON by a schema, until nothing is left to compile. Then it is idle for a while,
in which it gives back what it no longer needs. What counts is PSS: a page of a library that k processes share is 1/k
in each of them, so other programs with the same libraries make the figure smaller, and none should run. The exit status
is 1 if more is left beside weights and pool than `LIMIT_MIB`. What stands behind `--` are options of the server.
"""

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from bench.peers import engines
from bench.peers.checkpoint import SHAPES, make_checkpoint
from bench.peers.engines import ITEMSIZES, POOL_TOKENS, Setting
from bench.peers.workloads import WORKLOADS, Draw
from bench.report import ROOT, Report
from bench.served import Usage, engine_of, tree_of, usage_of
from bench.soak.memory import MIB
from jsg.models.config import read_spec

TRAFFIC = ("b32", "c8", "f")
LIMIT_MIB = 350
IDLE_S = 5.0
"""Seconds without requests before the memory is read. The engine gives memory back within a second of being idle."""


def read_usage(pid: int) -> dict[str, Usage]:
    """What each process of a server uses now. The processes for grammars have numbers."""
    names = {pid: "front", engine_of(pid): "engine"}
    found = {}
    for number, each in enumerate(tree_of(pid)):
        with contextlib.suppress(OSError, KeyError):  # a process that has ended meanwhile
            found[names.get(each, f"grammar process {number}")] = usage_of(each)
    return found


def rest_mib(usages: Iterable[Usage], *, weights_bytes: int, pool_bytes: int) -> float:
    """MiB of the PSS of all processes that are neither weights nor KV pool."""
    return (sum(usage.pss for usage in usages) - weights_bytes - pool_bytes) / MIB


def weights_bytes(model: Path, itemsize: int) -> int:
    """Bytes of the parameters of a checkpoint in float32 when each has `itemsize` bytes, to within its header."""
    return (model / "model.safetensors").stat().st_size // 4 * itemsize


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.memory", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="100m", help="the shape of the model")
    parser.add_argument("--dtype", choices=ITEMSIZES, default="float32")
    parser.add_argument("--divisor", type=int, default=1, help="divides lengths and numbers of requests, for a try")
    parser.add_argument("--directory", type=Path, default=ROOT / ".cache" / "peers", help="where checkpoints are kept")
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    parser.add_argument("serve", nargs="*", metavar="OPTIONS", help="options of the server")
    options = parser.parse_args(arguments)
    report = Report("bench.memory", arguments, options.output, shape=options.shape, dtype=options.dtype)
    model = make_checkpoint(options.directory, options.shape)
    config, itemsize = read_spec(model), ITEMSIZES[options.dtype]
    logs = Path(tempfile.mkdtemp(prefix="bench-memory-"))
    setting = Setting(
        model=model, dtype=options.dtype, quantization="none", logs=logs, num_threads=1, options=tuple(options.serve)
    )
    with engines.jsg(setting) as engine:
        for name in TRAFFIC:
            engine.client.run(WORKLOADS[name](Draw(name, config.vocab_size, options.divisor)))
        engine.settle()
        time.sleep(IDLE_S)
        usages = read_usage(engine.pid)
    weights, pool = weights_bytes(model, itemsize), POOL_TOKENS * config.kv_bytes_per_token(itemsize)
    report.add("weights", "MiB", [weights / MIB])
    report.add("KV pool", "MiB", [pool / MIB])
    for name, usage in usages.items():
        report.add(f"PSS, {name}", "MiB", [usage.pss / MIB], anonymous=usage.anonymous / MIB, rss=usage.rss / MIB)
    report.add("PSS, all processes", "MiB", [sum(usage.pss for usage in usages.values()) / MIB])
    rest = rest_mib(usages.values(), weights_bytes=weights, pool_bytes=pool)
    report.add("beside weights and pool", "MiB", [rest], target=f"<= {LIMIT_MIB}")
    report.close()
    return 0 if rest <= LIMIT_MIB else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
