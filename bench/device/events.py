"""The events that a part sends to the coordinator: one JSON object on each line of its standard output.

    {"figure": {"name": ..., "unit": ..., "samples": [...], "facts": {...}}}    a measurement
    {"header": {...}}                                                           fields for the head of the report
    {"failed": "...", "op": "..."}                                              why something has no figure; the
                                                                                operation that it was, if it is one
    {"left_out": "..."}                                                         what has no figure for lack of time

`bench/pytorch/worker.py`, which must not import anything from here, writes the same events.
"""

import contextlib
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from bench import clock
from bench.device.plan import Plan
from bench.shapes import write_model

KEYS = ({"figure"}, {"header"}, {"failed"}, {"failed", "op"}, {"left_out"})


class Part:
    """The task of one part, and its way to send events.

    Attributes:
        name: Name of the part.
        plan: What to measure.
        rates: Copy bandwidth and matmul rate of this device, `(bytes/s, flops/s)`; None if they are not known.
        folder: Scratch folder of the run.
        samples: Most timed calls for each figure.
        interpreters: Other interpreters by what they have.
    """

    def __init__(self, task: dict[str, Any], output: TextIO):
        self.name: str = task["part"]
        self.plan = Plan.from_json(task["plan"])
        self.rates: tuple[float, float] | None = task["rates"] and tuple(task["rates"])
        self.folder = Path(task["folder"])
        self.samples: int = task["samples"]
        self.interpreters: dict[str, str] = task.get("interpreters", {})
        self._started_at: float = task["started_at"]
        self._deadline = time.monotonic() + task["seconds"]
        self._output = output

    @property
    def age_s(self) -> float:
        """Seconds since the start of this process, with the start of its interpreter and its imports."""
        return time.time() - self._started_at

    def model_directory(self, plan: Plan | None = None) -> Path:
        """A directory from which the plan's model can be loaded."""
        shape = (plan or self.plan).shape
        return write_model(self.folder / f"model-{shape['num_hidden_layers']}", shape)

    def add(self, name: str, unit: str, samples: Iterable[float], **facts: Any) -> None:
        """Sends a figure."""
        self._write({"figure": {"name": name, "unit": unit, "samples": list(samples), "facts": facts}})

    def header(self, **fields: Any) -> None:
        """Sends fields for the head of the report."""
        self._write({"header": fields})

    @property
    def left_s(self) -> float:
        """Seconds until no further measurement should begin."""
        return self._deadline - time.monotonic()

    def left_out(self, reason: str) -> None:
        """Sends why something that is no failure has no figure."""
        self._write({"left_out": reason})

    def failed(self, name: str, error: Exception, op: str | None = None) -> None:
        """Sends the reason why something has no figure, and the operation that was tried alone, if one was."""
        traceback.print_exc()
        self.failed_as(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}", op)

    def failed_as(self, reason: str, op: str | None = None) -> None:
        """The same for what another process has reported, in one line."""
        self._write({"failed": reason} | ({} if op is None else {"op": op}))

    def attempt(self, name: str, run: Callable[[], object], *, op: str | None = None) -> None:
        """Runs a measurement. If it fails or would begin too late, the other measurements still run."""
        if self.left_s < 0:
            self.left_out(f"{name}: no time left")
            return
        try:
            run()
        except Exception as error:
            self.failed(name, error, op)
        gc.collect()

    def time(self, run: Callable[[], object], *, budget_s: float = 5.0) -> list[float]:
        """Milliseconds of each call, after five calls that are not timed because XLA makes its graphs in them."""
        return clock.sample_until(run, count=self.samples, warm_up=5, budget_s=budget_s)

    def _write(self, event: dict[str, Any]) -> None:
        print(json.dumps(event), file=self._output, flush=True)


def read(line: str) -> dict[str, Any] | None:
    """The event on a line; None for any other text."""
    with contextlib.suppress(json.JSONDecodeError):
        event = json.loads(line)
        if isinstance(event, dict) and set(event) in KEYS:
            return event
    return None


@contextlib.contextmanager
def private_stdout() -> Iterator[TextIO]:
    """Keeps standard output for events. Whatever libraries print, also from C, goes to standard error."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as private:
        os.dup2(2, 1)
        yield private
