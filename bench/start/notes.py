"""Reads what the processes of a server recorded of their start, and the CPU time of a process with its descendants."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

READY = "ready"
_PARENT, _TIMES = 1, slice(11, 15)  # fields of /proc/PID/stat behind the name: parent; CPU times, of dead children too


class Stage(NamedTuple):
    """The time that one process spent on one stage.

    Attributes:
        process: The process.
        name: The name of the stage.
        calls: How often it ran.
        start_s, end_s: Seconds from the start of the server to its first beginning and its last end.
        wall_s: Wall time of the stage without other stages inside it, summed over threads.
        cpu_s: CPU time of the threads that ran it, without XLA's own threads.
    """

    process: str
    name: str
    calls: int
    start_s: float
    end_s: float
    wall_s: float
    cpu_s: float


def read_stages(directory: Path, started_at: float) -> list[Stage]:
    """The stages of all processes, in the order of their beginnings.

    Args:
        directory: The directory with a file for each process.
        started_at: `time.monotonic()` at the start of the server.
    """
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text(encoding="utf-8").splitlines()]
    found = defaultdict(list)
    for line in lines:
        note = json.loads(line)
        found[note["process"], note["stage"]].append(note)
    stages = [
        Stage(
            *key,
            calls=len(notes),
            start_s=min(note["start"] for note in notes) - started_at,
            end_s=max(note["end"] for note in notes) - started_at,
            wall_s=sum(note["wall_s"] for note in notes),
            cpu_s=sum(note["cpu_s"] for note in notes),
        )
        for key, notes in found.items()
    ]
    return sorted(stages, key=lambda stage: stage.start_s)


def ready_s(stages: Iterable[Stage]) -> float:
    """The seconds from the start of the server until it said that it was ready."""
    return next(stage.start_s for stage in stages if stage.name == READY)


def cpu_s(pid: int) -> float:
    """The CPU seconds so far of a process and of all its descendants, also of those that have ended."""
    children, own = defaultdict(list), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):  # the process has ended
            continue
        child = int(path.parent.name)
        children[int(fields[_PARENT])].append(child)
        own[child] = sum(map(int, fields[_TIMES])) / os.sysconf("SC_CLK_TCK")

    def total(parent: int) -> float:
        return own.get(parent, 0.0) + sum(map(total, children[parent]))

    return total(pid)
