"""What the radix tree costs: its share of the time of a load that has nothing to gain from it.

    python -m bench.paper.tree --output FILE

The paper's figure is 0.2 of 74.3 seconds, for 100 requests with the lengths of ShareGPT and no prefix in common. Here
each method of the tree that a step calls is timed, in an engine in this process, on a model of `--shape`.
"""

import argparse
import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsg
from bench.peers.checkpoint import SHAPES, make_checkpoint
from bench.report import ROOT, Report
from bench.serving.workloads import WORKLOADS, Shape, Writer
from bench.settled import wait_until_compiled
from jsg.cache.radix import RadixCache
from jsg.types import SamplingParams

METHODS = ("match", "matched_len", "insert", "evict", "forget", "lock", "unlock", "watch", "unwatch", "drain_changed")
"""What a step calls. Requests look up their prefixes, give back what they computed, and make room."""


class Stopwatch:
    """The time in functions that it wraps. One inside another counts once."""

    def __init__(self) -> None:
        self.seconds, self.calls = 0.0, 0
        self._is_inside = False

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that does the same and is timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside, started = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - started
                self.calls += 1
                self._is_inside = False

        return timed

    @contextlib.contextmanager
    def on(self, kind: type, methods: tuple[str, ...]) -> Iterator[None]:
        """Times these methods of a class within the block."""
        plain = {name: getattr(kind, name) for name in methods}
        try:
            for name, method in plain.items():
                setattr(kind, name, self.wrapped(method))
            yield
        finally:
            for name, method in plain.items():
                setattr(kind, name, method)


def main(arguments: list[str]) -> None:
    made = argparse.ArgumentParser(
        prog="python -m bench.paper.tree", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--shape", choices=SHAPES, default="100m", help="the shape of the model, whose weights are random"
    )
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument("--requests", type=int, default=100)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--directory", type=Path, default=ROOT / ".cache" / "peers", help="where checkpoints are kept")
    made.add_argument("--output", type=Path, help="JSON file with every sample")
    options = made.parse_args(arguments)
    report = Report("bench.paper.tree", arguments, options.output, shape=options.shape, dtype=options.dtype)
    model = make_checkpoint(options.directory, options.shape)
    with jsg.Engine(str(model), dtype=options.dtype) as engine:
        wait_until_compiled(engine.get_server_info)
        walls, trees = [], []
        for seed in range(options.rounds):
            wall_s, watch = run(engine, seed, options.requests)
            walls.append(wall_s)
            trees.append(watch)
    report.add("all requests", "s wall", walls)
    shares = [100 * watch.seconds / wall_s for wall_s, watch in zip(walls, trees, strict=True)]
    report.add("in the tree", "% of it", shares, seconds=[watch.seconds for watch in trees], calls=trees[0].calls)
    report.close()


def run(engine: jsg.Engine, seed: int, count: int) -> tuple[float, Stopwatch]:
    """Answers so many requests at once. Gives the wall time and what of it was spent in the tree."""
    writer = Writer(vocab_size=engine.info.vocab_size)
    turns = [session.turns[0] for session in itertools.islice(WORKLOADS["sharegpt"](Shape(), writer, seed), count)]
    sampling = [SamplingParams(max_new_tokens=turn.max_tokens, ignore_eos=True, temperature=0.0) for turn in turns]
    prompts = [[int(token) for token in turn.text] for turn in turns]
    watch = Stopwatch()
    with watch.on(RadixCache, METHODS):
        started = time.perf_counter()
        engine.generate(input_ids=prompts, sampling_params=sampling)
        return time.perf_counter() - started, watch


if __name__ == "__main__":
    main(sys.argv[1:])
