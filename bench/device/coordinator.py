"""Runs the parts one after another, each in its own process, and collects their events. No JAX here.

The separate processes have three reasons. A device error, a crash or a hang ends only one part. The device's memory is
free again after each part, whether JAX or PyTorch used it. And a process reads compiler flags only once.
"""

import contextlib
import dataclasses
import datetime
import importlib.util
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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import report as reporting
from bench.device import events
from bench.device.catalogue import PARTS, TORCH_WORKER, Entry
from bench.device.failures import Failure, Kind
from bench.device.plan import Plan
from bench.device.results import Folder, Record

LEAST_S = 8.0
"""No part begins with less time left than this, because most would end before their first figure."""
GRACE_S = 5.0
"""How many seconds before its end a part stops beginning new measurements."""
SHOWN_ERROR_CHARS = 2000
LOGGED_ERROR_CHARS = 100_000
MARK = "JSG_BENCH_DEVICE"
"""In the environment of every process of a part: the folder of its run. By it a later call finds what a run that was
killed has left behind, which would hold the device's memory."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Coordinator:
    """One call of the program. Use `run` once.

    Attributes:
        folder: Gets everything that is measured.
        plan: What to measure. It is reduced to fit the device's memory once that is known.
        commit: The commit that is measured.
        deadline: When the call must end, on the monotonic clock.
        samples: Most timed calls for each figure.
        interpreters: Interpreters by what they have: `torch` (with transformers 5) and `vllm`.
        parts: The catalogue of the parts, in their order.
        after_each: Is called after each part.
        omitted: Parts that did not run in this call, and why; filled by `run`.
    """

    folder: Folder
    plan: Plan
    commit: str
    deadline: float
    samples: int
    interpreters: Mapping[str, str]
    parts: Mapping[str, Entry] = dataclasses.field(default_factory=lambda: PARTS)
    after_each: Callable[[], None] = lambda: None
    omitted: dict[str, str] = dataclasses.field(default_factory=dict)

    def run(self, names: Sequence[str], again: Collection[str] = ()) -> int:
        """Runs the parts that must run. Returns how many things failed in them."""
        end_leftovers(self.folder)
        to_do = self._to_do(names, again)
        num_failed = 0
        self.omitted |= dict.fromkeys(to_do, "not begun")
        with tempfile.TemporaryDirectory(prefix="jsg-device-") as scratch:
            for name in to_do:
                if (reason := self._why_omitted(name)) is not None:
                    self._omit(name, reason)
                    continue
                del self.omitted[name]
                num_failed += len(self._run_one(name, Path(scratch)).failures)
                self.after_each()
        return num_failed

    def _to_do(self, names: Sequence[str], again: Collection[str]) -> list[str]:
        """The parts that must run, with those whose results they need in the same call. The rates are such for all."""
        wanted: set[str] = set()
        for name in dict.fromkeys([*names, *again]):
            reason = None if name in again else self.folder.why_not(name)
            if reason is not None:
                self.omitted[name] = reason
                print(f"{name}: {reason}", flush=True)
                continue
            if changed := self.folder.why_again(name):
                print(f"{name}: again, because {changed}", flush=True)
            wanted |= {name, *filter(None, [self.parts[name].after])}
        if wanted:
            wanted |= {"rates"} & set(self.parts)
        self.omitted = {name: reason for name, reason in self.omitted.items() if name not in wanted}
        return [name for name in self.parts if name in wanted]

    def _why_omitted(self, name: str) -> str | None:
        """Why a part cannot run now; None if it can."""
        entry, platform = self.parts[name], self._header("platform")
        missing = [module for module in entry.needs if importlib.util.find_spec(module) is None]
        if missing:
            return f"this interpreter lacks {', '.join(missing)} ({entry.install})"
        if entry.interpreter is not None and entry.interpreter not in self.interpreters:
            return f"no interpreter with {entry.interpreter} (--{entry.interpreter}-python)"
        if platform == "cpu" and self.plan.is_for_accelerators:
            return f"plan {self.plan.name} is no work for a CPU, and JAX found no other device"
        rates = self._rates_now()
        if rates is not None and rates.failures and platform is None:
            return "the rates, which begin with finding the device, failed"
        if platform is not None and platform != "gpu" and entry.needs_gpu:
            return "it needs an NVIDIA GPU"
        if platform == "tpu" and not entry.is_for_tpu:
            return "it is about GPUs"
        if entry.after is not None:
            before = self.folder.records.get(entry.after)
            if before is None or before.call != self.folder.call or not before.is_done:
                return f"{entry.after}, which it needs, has no whole result in this call"
        return "no time left" if self.deadline - time.monotonic() < LEAST_S else None

    def _omit(self, name: str, reason: str) -> None:
        self.omitted[name] = reason
        print(f"\n{name} does not run: {reason}", flush=True)

    def _rates_now(self) -> Record | None:
        """The record of the rates of this call."""
        record = self.folder.records.get("rates")
        return record if record is not None and record.call == self.folder.call else None

    def _header(self, field: str) -> Any:
        """A field that the rates of this call have sent."""
        record = self._rates_now()
        return None if record is None else record.header.get(field)

    def _run_one(self, name: str, scratch: Path) -> Record:
        entry, left = self.parts[name], self.deadline - time.monotonic()
        print(f"\n{name}: {entry.about} ({left:.0f} s left)", flush=True)
        begin, errors = time.monotonic(), scratch / f"{name}.stderr"
        record = self.folder.begin(
            name,
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            commit=self.commit,
            is_cut=left < entry.limit_s,
            rates=None if name == "rates" else self._rates(),
            by_reference=self._by_reference(name),
        )
        try:
            self._run_process(record, entry, errors, min(entry.limit_s, left))
        except OSError as error:
            self._fail(record, f"{name}: it could not be started: {error.strerror}")
        except KeyboardInterrupt:
            record.is_cut = True
            record.left_out.append(f"{name}: interrupted")
            raise
        finally:
            self.folder.end(record, time.monotonic() - begin)
        if record.failures and errors.exists():
            self._show(name, errors.read_text(errors="replace"))
        return record

    def _run_process(self, record: Record, entry: Entry, errors: Path, limit_s: float) -> None:
        task = json.dumps(self._task(record, errors.parent, limit_s)) + "\n"
        with (
            errors.open("w") as stderr,
            _process(self._command(entry), self._environment(entry), stderr) as process,
            _limited(process, limit_s) as is_late,
        ):
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(task)
            for line in process.stdout:
                self._take(record, events.read(line))
            os.waitid(
                os.P_PID, process.pid, os.WEXITED | os.WNOWAIT
            )  # the process stays a zombie, so its id is not reused
        if is_late.is_set() and record.is_cut:
            record.left_out.append(f"{record.part}: the call ended after {limit_s:.0f} s of it")
        elif is_late.is_set():
            where = _innermost(errors.read_text(errors="replace"))
            record.failures.append(Failure(Kind.HANG, f"{record.part}: ended after {limit_s:.0f} s{where}"))
        elif process.returncode != 0 and not record.failures:  # otherwise the part has already reported the reason
            self._fail(record, f"{record.part}: exit status {process.returncode}")

    def _task(self, record: Record, scratch: Path, limit_s: float) -> dict[str, Any]:
        seconds = max(1.0, limit_s - GRACE_S)
        common = {"part": record.part, "seconds": seconds, "started_at": time.time()}
        run = self.parts[record.part].run
        if run is None:
            return self.plan.as_json() | common
        return common | {
            "run": run,
            "plan": self.plan.as_json(),
            "rates": record.rates,
            "samples": self.samples,
            "folder": str(scratch),
            "by_reference": record.by_reference,
            "interpreters": dict(self.interpreters),
        }

    def _command(self, entry: Entry) -> list[str]:
        if entry.run is None:
            return [self.interpreters["torch"], "-u", str(TORCH_WORKER)]
        return [sys.executable, "-m", "bench.device.part"]

    def _environment(self, entry: Entry) -> dict[str, str]:
        """The environment of a part: that of this process, its compiler flags, and the repository to import from."""
        environment = os.environ | {MARK: str(self.folder.path.resolve())}
        if entry.xla_flags:
            environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {entry.xla_flags}".strip()
        if entry.run is not None:
            paths = (str(reporting.ROOT), os.environ.get("PYTHONPATH"))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return environment

    def _rates(self) -> tuple[float, float] | None:
        """The best sample of each rate, because a floor is what the device can do undisturbed."""
        record = self._rates_now()
        if record is None:
            return None
        found = {figure.facts.get("kind"): max(figure.samples) for figure in record.figures}
        return (found["copy"] * 1e9, found["matmul"] * 1e12) if {"copy", "matmul"} <= set(found) else None

    def _by_reference(self, name: str) -> tuple[str, ...]:
        """The operations whose kernels did not compile in other parts. The check itself always asks the kernels."""
        if name == "correct":
            return ()
        failures = [failure for record in self.folder.current().values() for failure in record.failures]
        return tuple(sorted({each.op for each in failures if each.kind is Kind.COMPILE and each.op}))

    def _take(self, record: Record, event: dict[str, Any] | None) -> None:
        match event:
            case {
                "figure": {"name": str(name), "unit": str(unit), "samples": [_, *_] as samples, "facts": dict(facts)}
            }:
                if all(isinstance(sample, int | float) and math.isfinite(sample) for sample in samples):
                    figure = reporting.Figure(name, unit, tuple(samples), facts)
                    record.figures.append(figure)
                    print(reporting.table([figure], with_head=len(record.figures) == 1), flush=True)
                    self.folder.write(record)
                else:
                    self._fail(record, f"{name}: some of its samples are no numbers")
            case {"figure": _}:
                self._fail(record, "a figure that has no name, no unit, no samples or no facts")
            case {"header": fields}:
                record.header |= fields
                if "memory_bytes" in fields:
                    self.plan = self.plan.fit(fields["memory_bytes"])
                    record.header["num_layers"] = self.plan.shape["num_hidden_layers"]
            case {"failed": reason}:
                self._fail(record, reason, event.get("op"))
            case {"left_out": reason}:
                record.left_out.append(without_paths(reason))
                print(f"left out: {reason}", flush=True)

    def _fail(self, record: Record, reason: str, op: str | None = None) -> None:
        failure = Failure.from_reason(without_paths(reason), op)
        record.failures.append(failure)
        print(f"failed ({failure.kind}): {failure.reason}", flush=True)

    def _show(self, name: str, errors: str) -> None:
        print(errors[-SHOWN_ERROR_CHARS:], file=sys.stderr, flush=True)
        with (self.folder.path / "run.log").open("a", encoding="utf-8") as log:
            log.write(f"{name}, call {self.folder.call}\n\n{errors[-LOGGED_ERROR_CHARS:]}\n\n")


def without_paths(reason: str) -> str:
    """A reason without paths, because reports are published."""
    return re.sub(r"(?<!\w)(?:/[^\s/:'\"]+)+/", "", reason)[:500]


def end_leftovers(folder: Folder) -> None:
    """Kills what a part has left behind whose run was killed before the part ended."""
    if all(record.has_ended for record in folder.records.values()):
        return
    mark = f"{MARK}={folder.path.resolve()}".encode()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or belongs to somebody else
            if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                os.kill(int(entry), signal.SIGKILL)


def _innermost(errors: str) -> str:
    """Where the main thread stood when Python wrote all stacks, which it does a moment before a part is ended."""
    found = re.findall(r"most recent call first\):\n  File \"(?:.*/)?([^/\"]+)\", line (\d+) in (\w+)", errors)
    return "" if not found else ", in {2} ({0}:{1})".format(*found[-1])  # the main thread is the last one


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
