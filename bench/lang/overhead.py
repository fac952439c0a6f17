"""Measures the cost of the interpreter: milliseconds of each primitive, and memory of programs in flight."""

import json
import subprocess
import sys
import time

import jsg as sgl
from bench.lang.null_backend import NullBackend
from bench.report import ROOT, Report

TARGET_MS = "<= 0.3"
TARGET_BYTES = "<= 1e9"
CHOICES = ["yes", "no"]
BRANCHES = 8


@sgl.function
def texts(s, count):
    for index in range(count):
        s += f"text {index}"


@sgl.function
def gens(s, count):
    for index in range(count):
        s += sgl.gen(f"answer_{index}", max_tokens=8)


@sgl.function
def gens_read(s, count):
    for index in range(count):
        s += sgl.gen(f"answer_{index}", max_tokens=8)
        s[f"answer_{index}"]


@sgl.function
async def gens_awaited(s, count):
    for index in range(count):
        s += sgl.gen(f"answer_{index}", max_tokens=8)
        await s.aget(f"answer_{index}")


@sgl.function
def selects(s, count):
    for index in range(count):
        s += sgl.select(f"choice_{index}", choices=CHOICES)


@sgl.function
def turns(s, count):
    for index in range(count):
        s += sgl.user(f"text {index}")


@sgl.function
def forks(s, count):
    for index in range(count // BRANCHES):
        branches = s.fork(BRANCHES)
        branches += sgl.gen(f"answer_{index}", max_tokens=8)
        branches.join()


PRIMITIVES = {
    "text": texts,
    "gen": gens,
    "gen, then read": gens_read,
    "gen, then awaited": gens_awaited,
    "select": selects,
    "turn of a user": turns,
    f"branch of a fork of {BRANCHES}, with a gen and the join": forks,
}


def measure_primitives(report: Report, *, rounds: int, count: int = 400) -> None:
    """Measures the wall time of programs of one primitive each, on a backend that answers at once."""
    backend = NullBackend()
    for name, program in PRIMITIVES.items():
        samples = []
        for turn in range(rounds + 1):
            started = time.perf_counter()
            state = program.run(count, backend=backend)
            state.sync()
            milliseconds = 1000 * (time.perf_counter() - started) / count
            if (failure := state.error()) is not None:
                raise failure
            if turn:
                samples.append(milliseconds)
        report.add(f"one primitive: {name}", "ms", samples, target=TARGET_MS)


def measure_in_flight(report: Report, *, count: int) -> None:
    """Measures the memory of a fresh process in which this number of programs wait for their model."""
    for form in ("async", "sync"):
        command = [sys.executable, "-m", "bench.lang.in_flight", form, str(count)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command[1:])} ended with status {done.returncode}:\n{done.stderr}")
        found = json.loads(done.stdout)
        report.add(
            f"{count} programs in flight, {form} bodies",
            "bytes",
            [found["rss"]],
            target=TARGET_BYTES,
            before=found["rss_before"],
            threads=found["num_threads"],
        )
