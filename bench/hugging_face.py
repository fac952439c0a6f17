"""The client of `pytorch/forward_worker.py`, which runs Hugging Face transformers in turns with jsg."""

import json
import subprocess
from pathlib import Path
from typing import Any

from bench.clock import Sample, Timed

WORKER = Path(__file__).parent / "pytorch" / "forward_worker.py"


class HuggingFace:
    """A worker process with one model. Use it as a context manager."""

    def __init__(self, python: str, shape: dict[str, Any]):
        """Starts the worker on the cores of this process.

        Args:
            python: An interpreter that has torch and transformers.
            shape: The model's config.json.
        """
        self._process = subprocess.Popen(
            [python, "-u", str(WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.versions = self._ask(shape)

    def timed(self, *, cached: int, new: int, batch: int) -> Timed:
        """Times forward passes of `batch` rows, each with `new` tokens behind `cached` ones."""

        def samples(count: int) -> list[Sample]:
            answer = self._ask({"cached": cached, "new": new, "batch": batch, "count": count})
            return [Sample(*pair) for pair in answer["samples"]]

        return samples

    def _ask(self, fields: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the Hugging Face worker ended early; --torch-python must have torch and transformers 5")
        return json.loads(line)

    def __enter__(self) -> "HuggingFace":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
