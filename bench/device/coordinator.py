"""Runs the parts one after another, each in its own process, and collects their events. No JAX here.

The separate processes have three reasons. A device error, a crash or a hang ends only one part. The device's memory is
free again after each part, whether JAX or PyTorch used it. And a process reads compiler flags only once.
"""

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report as reporting
from bench.device import events
from bench.device.catalogue import PARTS, TORCH_WORKER, Entry
from bench.device.plan import Plan

LEAST_S = 8.0
"""No part begins with less time left than this, because most would end before their first figure."""
GRACE_S = 5.0
"""How many seconds before its end a part stops beginning new measurements."""
SHOWN_ERROR_CHARS = 2000
LOGGED_ERROR_CHARS = 100_000


class Coordinator:
    """One run: its report, its plan and its deadline. Use `run` once.

    Attributes:
        plan: What to measure. It is reduced to fit the device's memory once that is known.
    """

    def __init__(
        self,
        report: reporting.Report,
        plan: Plan,
        *,
        log: Path,
        deadline: float,
        samples: int,
        torch_python: str | None,
    ):
        """Makes a coordinator; `run` begins the parts.

        Args:
            report: Gets every figure. Its header also gets `unmeasured`: what has no figure, and why.
            plan: What to measure.
            log: Gets the standard error of the parts in which something failed.
            deadline: When the run must end, on the monotonic clock.
            samples: Most timed calls for each figure.
            torch_python: Interpreter with torch and transformers; None leaves PyTorch out.
        """
        self.plan = plan
        self._report = report
        self._log = log
        self._deadline = deadline
        self._samples = samples
        self._torch_python = torch_python
        self._num_failed = 0

    def run(self, names: Sequence[str]) -> int:
        """Runs the parts. Returns how many things failed; what was left out for lack of time is not counted."""
        with tempfile.TemporaryDirectory(prefix="jsg-device-") as folder:
            for name in names:
                self._run_one(name, Path(folder))
                if self.plan.is_for_accelerators and self._report.header.get("platform") == "cpu":
                    self._fail(
                        f"everything after {name}: plan {self.plan.name} is no work for a CPU, and JAX found no other"
                    )
                    break
        return self._num_failed

    def _run_one(self, name: str, folder: Path) -> None:
        entry, left = PARTS[name], self._deadline - time.monotonic()
        if entry.run is None and self._torch_python is None:
            self._unmeasured(f"{name}: no interpreter with torch (--torch-python)")
        elif left < LEAST_S:
            self._unmeasured(f"{name}: no time left")
        else:
            print(f"\n{name}: {entry.about} ({left:.0f} s left)", flush=True)
            begin, failed_before, errors = time.monotonic(), self._num_failed, folder / f"{name}.stderr"
            try:
                self._run_process(name, entry, errors, min(entry.limit_s, left))
            except OSError as error:
                self._fail(f"{name}: it could not be started: {error.strerror}")
            self._report.header["part_s"][name] = round(time.monotonic() - begin, 1)
            if self._num_failed > failed_before and errors.exists():
                self._show(name, errors.read_text(errors="replace"))

    def _run_process(self, name: str, entry: Entry, errors: Path, limit_s: float) -> None:
        task = json.dumps(self._task(name, errors.parent, max(1.0, limit_s - GRACE_S))) + "\n"
        failed_before = self._num_failed
        with (
            errors.open("w") as stderr,
            _process(self._command(entry), _environment(entry), stderr) as process,
            _limited(process, limit_s) as is_late,
        ):
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(task)
            for line in process.stdout:
                self._take(events.read(line))
            os.waitid(
                os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
            )  # the process stays a zombie, so its id is not reused
        if is_late.is_set():
            self._fail(f"{name}: ended after {limit_s:.0f} s")
        elif (
            process.returncode != 0 and self._num_failed == failed_before
        ):  # otherwise the part has already reported the reason
            self._fail(f"{name}: exit status {process.returncode}")

    def _task(self, name: str, folder: Path, seconds: float) -> dict[str, Any]:
        plan = self.plan.as_json()
        common = {"part": name, "seconds": seconds, "started_at": time.time()}
        if PARTS[name].run is None:
            return plan | common
        return common | {"plan": plan, "rates": self._rates(), "samples": self._samples, "folder": str(folder)}

    def _command(self, entry: Entry) -> list[str]:
        if entry.run is None:
            assert self._torch_python is not None
            return [self._torch_python, "-u", str(TORCH_WORKER)]
        return [sys.executable, "-m", "bench.device.part"]

    def _rates(self) -> tuple[float, float] | None:
        """The best sample of each rate, because a floor is what the device can do undisturbed."""
        found = {figure.facts.get("kind"): max(figure.samples) for figure in self._report.figures}
        return (found["copy"] * 1e9, found["matmul"] * 1e12) if {"copy", "matmul"} <= set(found) else None

    def _take(self, event: dict[str, Any] | None) -> None:
        match event:
            case {
                "figure": {"name": str(name), "unit": str(unit), "samples": [_, *_] as samples, "facts": dict(facts)}
            }:
                if all(isinstance(sample, int | float) and math.isfinite(sample) for sample in samples):
                    self._report.add(name, unit, samples, **facts)
                else:
                    self._fail(f"{name}: some of its samples are no numbers")
            case {"figure": _}:
                self._fail("a figure that has no name, no unit, no samples or no facts")
            case {"header": fields}:
                self._report.header |= fields
                if "memory_bytes" in fields:
                    self.plan = self.plan.fit(fields["memory_bytes"])
                    self._report.header["num_layers"] = self.plan.shape["num_hidden_layers"]
            case {"failed": reason}:
                self._fail(reason)
            case {"left_out": reason}:
                self._unmeasured(reason)

    def _fail(self, reason: str) -> None:
        self._num_failed += 1
        self._unmeasured(reason)

    def _unmeasured(self, reason: str) -> None:
        """The header's `unmeasured`, without paths, because reports are published."""
        shown = re.sub(r"(?:/[^\s/:'\"]+)+/", "", reason)[:500]
        self._report.header["unmeasured"].append(shown)
        print(f"not measured: {shown}", flush=True)

    def _show(self, name: str, errors: str) -> None:
        print(errors[-SHOWN_ERROR_CHARS:], file=sys.stderr, flush=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"{name}\n\n{errors[-LOGGED_ERROR_CHARS:]}\n\n")


def _environment(entry: Entry) -> dict[str, str]:
    """The environment of a part: that of this process, its compiler flags, and the repository to import from."""
    environment = dict(os.environ)
    if entry.xla_flags:
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {entry.xla_flags}".strip()
    if entry.run is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(reporting.ROOT), os.environ.get("PYTHONPATH"))))
    return environment


@contextlib.contextmanager
def _process(command: Sequence[str], environment: Mapping[str, str], stderr: Any) -> Iterator[subprocess.Popen[str]]:
    """A process in its own session. All processes of the session are killed at the end."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=stderr,
        env=dict(environment),
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _kill_session(process)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@contextlib.contextmanager
def _limited(process: subprocess.Popen[str], seconds: float) -> Iterator[threading.Event]:
    """Kills the process when its time is up. The event says whether that happened."""
    is_late = threading.Event()

    def end() -> None:
        is_late.set()
        _kill_session(process)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()
        timer.join()


def _kill_session(process: subprocess.Popen[str]) -> None:
    """Kills the process and all that it has started, because compile workers would keep its standard output open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
