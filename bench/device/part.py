"""Runs one part in this process: `python -m bench.device.part`. Its task comes on standard input as JSON."""

import importlib
import json
import sys

from bench.device.catalogue import PARTS
from bench.device.events import Part, private_stdout
from jsg.engine.device.executables import use_compilation_cache


def main() -> None:
    task = json.loads(sys.stdin.readline())
    entry = PARTS[task["part"]]
    assert entry.run is not None, "a part of the PyTorch worker"
    module, _, function = entry.run.partition(":")
    use_compilation_cache(f"{task['folder']}/cache")  # all parts of a run share it
    with private_stdout() as output:
        part = Part(task, output)
        try:
            getattr(importlib.import_module(module), function)(part)
        except Exception as error:
            part.failed(task["part"], error)
            raise SystemExit(1) from None


if __name__ == "__main__":
    main()
