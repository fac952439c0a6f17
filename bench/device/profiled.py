"""The kernels that take the time of a decode step, from a trace of a few layers by `jax.profiler`.

Under the profiler XLA runs the programs kernel by kernel and not as CUDA graphs, so only shares of the time mean
something. On a CPU the names are those of XLA's operations, which shows that the part works and little else.
"""

import collections
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from bench.bare import BareStep, Work
from bench.device.events import Part
from bench.device.steps import make_bare, padded
from jsg.sched.buckets import BucketKey, Phase

STEPS = 3
SHOWN = 8
"""So many kernels of each step become figures, the longest first."""
DEVICE_PLANES = ("/device:GPU", "/device:TPU")
DEVICE_LINES = ("Stream", "XLA Ops")
"""Of a GPU, and of a TPU. Other lines of a device count the same time again, by operation or by step."""
HOST_PLANE = "/host:CPU"
WRAPPER = "ThunkExecutor"
"""On a CPU these events are around those of the operations."""


def measure(part: Part) -> None:
    """Traces decode steps with the fewest and with the most rows."""
    plan = part.plan.with_layers(min(part.plan.ab_layers, part.plan.shape["num_hidden_layers"]))
    bare = make_bare(part, plan)
    for rows in (min(plan.batches), max(plan.batches)):
        part.attempt(f"trace of a decode step, B={rows}", functools.partial(_measure, part, bare, rows))


def _measure(part: Part, bare: BareStep, rows: int) -> None:
    bucket = padded(rows)
    work = bare.prepare(BucketKey(Phase.DECODE, bucket, bucket), [(part.plan.context, 1)] * rows)
    folder = part.folder / f"trace-{rows}"
    _trace(bare, work, folder)
    times = kernel_times(folder)
    total = sum(times.values())
    if not total:
        raise RuntimeError("the trace has no kernels")
    for name, us in sorted(times.items(), key=lambda item: -item[1])[:SHOWN]:
        facts = {"rows": rows, "kernel": name, "share": us / total}
        part.add(f"decode B={rows}: {name[:40]}", "us/step", [us / STEPS], kind="profile", **facts)


def _trace(bare: BareStep, work: Work, folder: Path) -> None:
    for _ in range(STEPS):
        bare.run(work)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing every Python call would mostly show the tracing
    with jax.profiler.trace(folder, profiler_options=options):
        for _ in range(STEPS):
            bare.run(work)


def kernel_times(folder: Path) -> Mapping[str, float]:
    """Microseconds by kernel, summed over all streams of a trace."""
    times: collections.defaultdict[str, float] = collections.defaultdict(float)
    for file in folder.rglob("*.xplane.pb"):
        for name, us in _events(file):
            times[name] += us
    return times


def _events(file: Path) -> Iterator[tuple[str, float]]:
    planes = list(jax.profiler.ProfileData.from_file(str(file)).planes)
    devices = [plane for plane in planes if plane.name.startswith(DEVICE_PLANES)]
    for plane in devices or [plane for plane in planes if plane.name == HOST_PLANE]:
        for line in plane.lines:
            if line.name.startswith(DEVICE_LINES) if devices else "XLA" in line.name:
                for event in (each for each in line.events if not each.name.startswith(WRAPPER)):
                    yield event.name, event.duration_ns / 1e3
