"""Answers of engines whose model several devices share. They run in separate processes; see `parallel_answers.py`."""

import dataclasses
import pathlib
from typing import Any

from tests.engine import small
from tests.golden.variants import random_tensors, write_checkpoint
from tests.own_process import said

MAX_DIFFERENCE = 1e-4
VARIANT = "llama_tied"

Run = dict[str, Any]
Answer = dict[str, Any]


def answers(runs: list[Run]) -> list[Answer]:
    return said("tests.engine.parallel_answers", told=runs)


@dataclasses.dataclass(frozen=True)
class SharedOut:
    """The answers of a small model to a few requests on one device and on two, and the run that gave them."""

    run: Run
    by_count: dict[int, Answer]


def shared_out(directory: pathlib.Path, cache_dir: str) -> SharedOut:
    write_checkpoint(directory, VARIANT, random_tensors(VARIANT, 0))
    run = {"variant": VARIANT, "directory": str(directory), "cache_dir": cache_dir, "knobs": small.DETERMINISTIC}
    run |= {"num_new": 8, "num_requests": 3}
    one, two = answers([{**run, "tp_size": count} for count in (1, 2)])
    return SharedOut(run, {1: one, 2: two})
