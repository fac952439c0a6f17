"""Measures the time from the start of `jsg serve` to its first answer, with empty caches and with full ones.

    python -m bench.start [--rounds N] [--output FILE] [-- OPTIONS]

"Empty" is a new machine, with no compiled programs, no compiled kernels and no Python byte code: the server gets a new
home and a new folder for byte code. "Full" is the next start, after the first one has compiled everything. For each
start the report says where the time went, by process and stage. Work in XLA's own threads is only in the CPU time of
all processes. The machine should be quiet, because wall time is measured; the report has its load. The model is the
embedded one. What stands behind `--` are options of the server; the targets are for none.
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from bench.report import Report
from bench.settled import wait_until_compiled
from bench.start.notes import Stage, cpu_s, read_stages, ready_s
from jsg.free_ports import free_ports

SPY = Path(__file__).parent / "spy"
LIMIT_S = 300
POLL_S = 0.02
QUESTION = {"text": "<|user|>What is the capital of France?<|end|><|assistant|>", "sampling_params": {"temperature": 0}}
CONSTRAINED = {"text": "A word:", "sampling_params": {"temperature": 0, "regex": "[a-z]{1,8}"}}
TARGETS = {"empty": "<= 15", "full": "<= 4"}


class Start(NamedTuple):
    """One start of a server.

    Attributes:
        answer_s: Seconds until the first answer.
        answer_cpu_s: CPU seconds of all processes until then.
        grammar_s: Seconds until the first answer with a grammar, which is asked for after the other answer.
        stages: The stages that began before the first answer.
    """

    answer_s: float
    answer_cpu_s: float
    grammar_s: float
    stages: list[Stage]


def start(home: Path, options: Sequence[str], *, waits_for_caches: bool) -> Start:
    """Starts a server in a home, asks it, and stops it. On demand it stops only when everything is compiled."""
    notes = Path(tempfile.mkdtemp(dir=home))
    with _server(home, notes, options) as (process, http, started_at):
        while not _has_answered(http, QUESTION):
            assert process.poll() is None, "the server ended before it answered"
            assert time.monotonic() - started_at < LIMIT_S, "the server does not answer"
            time.sleep(POLL_S)
        answer_s, answer_cpu_s = time.monotonic() - started_at, cpu_s(process.pid)
        assert _has_answered(http, CONSTRAINED), "the server answers with a grammar too"
        grammar_s = time.monotonic() - started_at
        if waits_for_caches:
            wait_until_compiled(lambda: http.get("/get_server_info").json()["internal_states"][0])
        stages = [stage for stage in read_stages(notes, started_at) if stage.start_s < answer_s]
        return Start(answer_s, answer_cpu_s, grammar_s, stages)


@contextlib.contextmanager
def _server(
    home: Path, notes: Path, options: Sequence[str]
) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client, float]]:
    """A server whose caches are all in one home, its client, and the time of its start."""
    port = free_ports()
    writes_byte_code = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = writes_byte_code | {
        "HOME": str(home),
        "PYTHONPYCACHEPREFIX": str(home / "byte-code"),
        "PYTHONPATH": os.pathsep.join([str(SPY), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]).rstrip(":"),
        "BENCH_START_NOTES": str(notes),
    }
    command = [sys.executable, "-m", "jsg.cli", "serve", "--port", str(port), *options]
    started_at = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=LIMIT_S) as http:
            yield process, http, started_at
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


def _has_answered(http: httpx.Client, question: dict[str, object]) -> bool:
    try:
        return http.post("/generate", json=question).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__)
    parser.add_argument("--output", type=Path, help="JSON file with every sample")
    parser.add_argument("--rounds", type=int, default=3, help="number of starts with empty and with full caches")
    parser.add_argument("serve", nargs="*", metavar="OPTIONS", help="options of the server")
    options = parser.parse_args(arguments)
    report = Report("bench.start", arguments, options.output, model="tiny")
    starts: dict[str, list[Start]] = {"empty": [], "full": []}
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as home:  # mode 0700, as a folder of caches must be
            starts["empty"].append(start(Path(home), options.serve, waits_for_caches=True))
            starts["full"].append(start(Path(home), options.serve, waits_for_caches=False))
    for arm, made in starts.items():
        report_stages(report, arm, made[-1].stages)
    for arm, made in starts.items():
        report.add(f"first answer, {arm} caches", "s wall", [each.answer_s for each in made], target=TARGETS[arm])
        report.add(f"  of it until ready, {arm} caches", "s wall", [ready_s(each.stages) for each in made])
        report.add(f"  CPU of all processes, {arm} caches", "s CPU", [each.answer_cpu_s for each in made])
        report.add(f"  first answer with a grammar, {arm} caches", "s wall", [each.grammar_s for each in made])
    report.close()


def report_stages(report: Report, arm: str, stages: list[Stage]) -> None:
    """Adds one figure for each stage of a start."""
    for stage in stages:
        facts = {"cpu_s": stage.cpu_s, "from_s": stage.start_s, "to_s": stage.end_s, "calls": stage.calls}
        report.add(f"{arm}: {stage.process}, {stage.name}", "s wall", [stage.wall_s], **facts)


if __name__ == "__main__":
    main(sys.argv[1:])
