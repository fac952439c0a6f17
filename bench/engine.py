"""Measures the engine on one core of this CPU, in turns with Hugging Face transformers: `python -m bench.engine`.

Everything is float32, weights are random, and times are processor time of the whole process. Parts:

    decode          the two bare programs of a decode step, 256 cached tokens per row, against one forward pass of HF
    prefill         the same for prompts of 256 and 1024 tokens
    loop            EngineCore.step against its bare programs, and with a model that computes nothing
    shared-prefix   64 requests with one common prefix, with and without the radix cache
    deterministic   the cost of --deterministic
"""

import argparse
import contextlib
import dataclasses
import datetime
import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import report as reporting
from bench.bare import BareStep
from bench.clock import Timed, alternate, pin_to_one_core, timed
from bench.deterministic import measure_deterministic
from bench.hugging_face import HuggingFace
from bench.loop import measure_loop, measure_null
from bench.shapes import LLAMA_100M, write_model
from bench.shared_prefix import measure_shared_prefix
from jsg.engine.device.executables import use_compilation_cache
from jsg.models.config import read_spec
from jsg.sched.buckets import BucketKey, Phase, make_buckets

MAX_ROWS = 8
CACHED = 256
DECODE_TARGETS = {1: ">= 1.6", 8: ">= 1.1"}
PREFILL_TARGETS = {256: ">= 1.0", 1024: ">= 0.95"}
MAX_CONTEXT = 1024 + 64


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """What the parts share."""

    report: reporting.Report
    shape: dict[str, Any]
    directory: Path
    hugging_face: HuggingFace | None
    scale: float

    def rounds(self, count: int) -> int:
        """The number of rounds, scaled by `--scale`."""
        return max(1, round(count * self.scale))

    @functools.cache  # noqa: B019 - one object of it lives as long as the program
    def bare(self, *, is_shuffled: bool) -> BareStep:
        """The model of the parts that compare bare programs. `BareStep` says how its pages are placed."""
        config = read_spec(self.directory)
        return BareStep(config, jnp.float32, max_rows=MAX_ROWS, context_len=MAX_CONTEXT, is_shuffled=is_shuffled)


def decode(bench: Bench) -> None:
    for batch, target in DECODE_TARGETS.items():
        key, rows = _key(Phase.DECODE, batch), [(CACHED, 1)] * batch
        ours = {
            "jsg": timed(bench.bare(is_shuffled=False).runner(key, rows)),
            "jsg with pages shuffled": timed(bench.bare(is_shuffled=True).runner(key, rows)),
        }
        name = f"decode B={batch} ctx {CACHED}"
        _against_hugging_face(bench, name, ours, target, (CACHED, 1, batch), rounds=8, per_round=10)


def prefill(bench: Bench) -> None:
    for length, target in PREFILL_TARGETS.items():
        ours = bench.bare(is_shuffled=True).runner(_key(Phase.EXTEND, length), [(0, length)])
        name = f"prefill T={length}"
        _against_hugging_face(bench, name, {"jsg": timed(ours)}, target, (0, length, 1), rounds=4, per_round=2)


def loop(bench: Bench) -> None:
    for batch in (8, 32):
        measure_loop(bench.report, bench.directory, batch, prompt_len=128, rounds=bench.rounds(10), steps=6)
    measure_null(bench.report, bench.directory / "null", 256, prompt_len=16, steps=bench.rounds(200))


def shared_prefix(bench: Bench) -> None:
    measure_shared_prefix(bench.report, bench.directory, rounds=bench.rounds(2))


def deterministic(bench: Bench) -> None:
    measure_deterministic(bench.report, bench.directory, batches=(1, MAX_ROWS), rounds=bench.rounds(5), steps=4)


PARTS: dict[str, Callable[[Bench], None]] = {
    "decode": decode,
    "prefill": prefill,
    "loop": loop,
    "shared-prefix": shared_prefix,
    "deterministic": deterministic,
}


def _key(phase: Phase, num_tokens: int) -> BucketKey:
    """The shape that an engine for `MAX_ROWS` requests picks."""
    return make_buckets(MAX_ROWS, max(PREFILL_TARGETS)).pick(phase, num_tokens)


def _against_hugging_face(
    bench: Bench,
    name: str,
    ours: dict[str, Timed],
    target: str,
    work: tuple[int, int, int],
    *,
    rounds: int,
    per_round: int,
) -> None:
    """Reports all sides and the ratio of their smallest samples; only the side of jsg without --torch-python."""
    cached, new, batch = work
    sides = dict(ours)
    if bench.hugging_face is not None:
        sides["hf"] = bench.hugging_face.timed(cached=cached, new=new, batch=batch)
    samples = alternate(sides, rounds=bench.rounds(rounds), per_round=per_round)
    figures = {
        side: bench.report.add(
            f"{name}, {side}",
            "ms cpu",
            [sample.cpu_ms for sample in samples[side]],
            tokens_per_s=new * batch / min(sample.cpu_ms for sample in samples[side]) * 1e3,
            min_wall_ms=min(sample.wall_ms for sample in samples[side]),
        )
        for side in sides
    }
    for side in ours if "hf" in figures else ():
        of_medians = figures["hf"].median / figures[side].median
        ratio = figures["hf"].smallest / figures[side].smallest
        bench.report.add(f"{name}, hf / {side}", "x", [ratio], of_medians=of_medians, target=target)


def main(arguments: Sequence[str]) -> None:
    options = _options(arguments)
    core = pin_to_one_core()
    use_compilation_cache(None)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        hugging_face = None
        if options.torch_python and {"decode", "prefill"} & set(options.only):
            hugging_face = stack.enter_context(HuggingFace(options.torch_python, LLAMA_100M))
        report = reporting.Report(
            "bench.engine",
            arguments,
            options.output,
            model="100M: random weights, float32",
            pinned_to_core=core,
            platform=jax.default_backend(),
            hugging_face=hugging_face.versions if hugging_face else "not compared: no --torch-python",
        )
        bench = Bench(report, LLAMA_100M, write_model(folder, LLAMA_100M), hugging_face, options.scale)
        for name in options.only:
            PARTS[name](bench)
        report.close()


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    today = datetime.datetime.now(datetime.UTC).date()
    parser.add_argument(
        "--only", type=_part_names, default=list(PARTS), help="the parts to run, separated by commas; default: all"
    )
    parser.add_argument("--torch-python", help="Python interpreter with torch and transformers 5, to compare with")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for the number of rounds, such as 0.5 for half of them"
    )
    parser.add_argument(
        "--output", type=Path, default=reporting.ROOT / "bench" / "results" / f"engine-cpu-{today}.json"
    )
    return parser.parse_args(arguments)


def _part_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := sorted(set(names) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"the parts are {', '.join(PARTS)}, but got {', '.join(unknown)}")
    return names


if __name__ == "__main__":
    main(sys.argv[1:])
