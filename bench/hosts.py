"""Measures the cost of sending a step to other hosts, and when it is sent: `python -m bench.hosts --output hosts.json`.

First the calls of a step of a large server are sent over loopback to processes that read them as followers do. A
network would add its own time, for which the leader does not wait. Then an engine of 100M parameters runs on two hosts,
which are two processes, and each step records whether the step before it was still being computed when it was sent.
"""

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import Report
from bench.shapes import LLAMA_100M, write_model
from jsg.config import EngineConfig
from jsg.engine.core import EngineCore
from jsg.engine.device import step
from jsg.engine.device.results import InFlight
from jsg.engine.device.runner import ModelRunner
from jsg.engine.hosts.watch import Computed
from jsg.engine.hosts.wire import CallCodec
from jsg.free_ports import free_ports
from jsg.prompt_ids import PromptIds
from jsg.sched.buckets import BucketKey, make_buckets
from jsg.types import Request, SamplingParams

STEP_MS = 20.0
"""The time of a step with which the cost is compared."""
TARGET = "<= 10 % of a step of 20 ms"
MAX_RUNNING, CHUNK = 256, 8192
BUCKETS = make_buckets(MAX_RUNNING, CHUNK, row_multiple=8)


def schema() -> dict[Hashable, Sequence[jax.ShapeDtypeStruct]]:
    """The programs of every step, and their arguments from the host."""
    made: dict[Hashable, Sequence[jax.ShapeDtypeStruct]] = {}
    for key in BUCKETS.all:
        made["forward", key] = [jax.ShapeDtypeStruct((sum(step.packed_sizes(key)),), jnp.int32)]
        made["sample", key.num_rows] = [jax.ShapeDtypeStruct((key.num_rows, step.SAMPLING_COLUMNS), jnp.int32)]
    return made


def measure_sending(report: Report, *, num_followers: int, keys: Sequence[BucketKey], steps: int) -> None:
    """Measures milliseconds to send a step to all followers, which read it while the next steps come."""
    codec = CallCodec(schema())
    with _followers(num_followers) as connections:
        for key in keys:
            calls = [("forward", key), ("sample", key.num_rows)]
            arrays = [[np.ones(each.shape, each.dtype) for each in schema()[name]] for name in calls]
            samples = []
            for _ in range(steps + 10):
                start = time.perf_counter()
                for name, of_call in zip(calls, arrays, strict=True):
                    codec.send(connections, name, of_call)
                samples.append((time.perf_counter() - start) * 1e3)
                time.sleep(0.002)  # the step itself
            del samples[:10]
            report.add(
                f"sent to {num_followers}: {key.phase.value}, {key.num_tokens} tokens",
                "ms",
                samples,
                bytes=sum(array.nbytes for of_call in arrays for array in of_call),
                p99_percent_of_step=round(float(np.quantile(samples, 0.99)) / STEP_MS * 100, 2),
                target=TARGET,
            )
        codec.send_end(connections)


@contextlib.contextmanager
def _followers(count: int) -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        command = [sys.executable, "-m", "bench.hosts", "--read-at", str(listener.getsockname()[1])]
        processes = [opened.enter_context(subprocess.Popen(command)) for _ in range(count)]
        connections = [opened.enter_context(listener.accept()[0]) for _ in processes]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connections
        for process in processes:
            assert process.wait(30) == 0, "a follower has read to the end"


def read_calls(port: int) -> None:
    """Reads calls as a follower does, without making them."""
    codec = CallCodec(schema())
    with socket.create_connection(("127.0.0.1", port)) as connection:
        while codec.receive(connection) is not None:
            pass


def measure_overlap(report: Report, *, shape: dict[str, Any], batch: int, steps: int) -> None:
    """Measures how many steps of an engine on two hosts are sent while the step before is still being computed."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(_Pair(Path(folder), shape, batch, steps + 20)) as pair,
    ):
        pair.run(steps=10)  # prompts, and first runs
        pair.forget()
        started = time.perf_counter()
        pair.run(steps=steps)
        step_ms = (time.perf_counter() - started) * 1e3 / steps
        of_step = f"B={batch}, two hosts, 100M"
        report.add(f"a step, {of_step}", "ms", [step_ms])
        report.add(
            f"sent and dispatched, {of_step}",
            "ms",
            pair.sent_ms,
            percent_of_step=round(statistics.median(pair.sent_ms) / step_ms * 100, 2),
            target="<= 10 % of a step",
        )
        early = sum(pair.was_early) / len(pair.was_early) * 100
        report.add(f"steps sent while the one before ran, {of_step}", "%", [early], target="100 %")


class _Pair:
    """An engine on two processes that decodes `batch` requests, and what its leader recorded."""

    def __init__(self, folder: Path, shape: dict[str, Any], batch: int, num_new: int):
        self.sent_ms: list[float] = []
        self.was_early: list[bool] = []
        knobs: dict[str, Any] = {
            "load_format": "dummy",
            "tp_size": 2,
            "nnodes": 2,
            "dist_init_addr": f"127.0.0.1:{free_ports(count=2)}",
            "dist_timeout": 120.0,
            "max_running_requests": batch,
            "max_total_tokens": 16_384,
        }
        directory = str(write_model(folder, shape))
        options = [word for name, value in knobs.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        follower = [sys.executable, "-m", "jsg.cli", "serve", directory, *options, "--node-rank", "1"]
        self._follower = subprocess.Popen(follower, stdout=sys.stderr)
        self._core = EngineCore(EngineConfig(model_path=directory, **knobs))
        self._note(self._core._runner)
        sampling = SamplingParams(temperature=0, ignore_eos=True, max_new_tokens=num_new)
        for index in range(batch):
            self._core.add(Request(rid=str(index), input_ids=PromptIds.of((5, 6, 7 + index)), sampling=sampling))

    def run(self, *, steps: int) -> None:
        """Runs this number of steps."""
        for _ in range(steps):
            self._core.step()

    def forget(self) -> None:
        """Drops what was recorded so far."""
        self.sent_ms.clear()
        self.was_early.clear()

    def close(self) -> None:
        """Ends both processes."""
        self._core.close()
        assert self._follower.wait(60) == 0, "the follower ends with its leader"

    def _note(self, runner: ModelRunner) -> None:
        dispatch = runner.dispatch

        def noted(*arguments: Any) -> InFlight:
            before = self._core._in_flight
            start = time.perf_counter()
            flight = dispatch(*arguments)
            self.sent_ms.append((time.perf_counter() - start) * 1e3)
            if before is not None:
                self.was_early.append(not cast(Computed, before.output.tokens).is_ready())
            return flight

        runner.dispatch = noted  # pyright: ignore[reportAttributeAccessIssue]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.hosts", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file for the figures")
    parser.add_argument("--steps", type=int, default=200, help="number of steps in each measurement")
    parser.add_argument("--batch", type=int, default=8, help="number of requests of the engine on two hosts")
    parser.add_argument("--read-at", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.read_at is not None:
        return read_calls(options.read_at)
    report = Report("bench.hosts", sys.argv[1:] if arguments is None else arguments, options.output)
    keys = [BUCKETS.decode[-1], BUCKETS.extend[-1]]
    for count in (1, 3, 7):
        measure_sending(report, num_followers=count, keys=keys, steps=options.steps)
    measure_overlap(report, shape=LLAMA_100M, batch=options.batch, steps=options.steps)
    report.close()


if __name__ == "__main__":
    main()
