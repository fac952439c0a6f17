"""Runs one part in this process: `python -m bench.device.part`. Its task comes on standard input as JSON."""

import faulthandler
import functools
import importlib
import json
import sys
import time
from collections.abc import Sequence

from bench.device.events import Part, private_stdout
from jsg.engine.device.executables import use_compilation_cache
from jsg.kernels_pallas import ops

STACKS_S = 4.0
"""How many seconds after a part should have begun nothing more it writes where each of its threads stands. That is
shortly before the coordinator kills it."""


def main() -> None:
    task = json.loads(sys.stdin.readline())
    age_s = time.time() - task["started_at"]
    faulthandler.dump_traceback_later(max(0.1, task["seconds"] + STACKS_S - age_s))
    module, _, function = task["run"].partition(":")
    use_compilation_cache(f"{task['folder']}/cache")  # all parts of a run share it
    compute_by_reference(task["by_reference"])
    with private_stdout() as output:
        part = Part(task, output)
        try:
            getattr(importlib.import_module(module), function)(part)
        except Exception as error:
            part.failed(task["part"], error)
            raise SystemExit(1) from None
    faulthandler.cancel_dump_traceback_later()


def compute_by_reference(names: Sequence[str]) -> None:
    """Lets plain `jnp` do these operations in this process, because their kernels do not compile on its device."""
    for name in names:
        setattr(ops, name, functools.partial(getattr(ops, name), implementation="reference"))


if __name__ == "__main__":
    main()
