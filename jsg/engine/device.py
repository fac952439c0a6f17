"""Which device JAX gets, and how much of its memory, decided before JAX looks for one.

Left alone, JAX opens every GPU it can see and reserves three quarters of the memory of each. An engine uses one, so it
shows JAX the one with the most free memory, and lets it reserve what `--mem-fraction-static` says. What the user has
set is left as it is.
"""

import contextlib
import csv
import dataclasses
import importlib.util
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping

import jax
from jax._src import xla_bridge  # JAX has no public way to ask whether it has started

from jsg.errors import ConfigError, MemoryPlanError

logger = logging.getLogger(__name__)

VISIBLE = "CUDA_VISIBLE_DEVICES"
FRACTION = "XLA_CLIENT_MEM_FRACTION"
FRACTIONS = (FRACTION, "XLA_PYTHON_CLIENT_MEM_FRACTION")  # JAX raises where both are set
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
NVIDIA_SMI_TIMEOUT_S = 20.0  # a driver that has to wake up first takes seconds
OUTSIDE_BYTES = 2**30
"""Left free beside what JAX reserves, for the CUDA context and loaded programs. Not measured on a device."""
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as `nvidia-smi` sees it."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is to be set before JAX starts, and why.

    Attributes:
        gpu: The GPU that JAX will use; None where there is none or nobody can tell which.
        why: A clause for people.
        environment: Variables to set while JAX starts.
    """

    gpu: Gpu | None
    why: str
    environment: Mapping[str, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """The device of this engine.

    Attributes:
        platform: JAX's name of its kind: "cpu", "gpu", "tpu".
        kind: What it calls itself.
        gpu: What `nvidia-smi` said of it before JAX started; None where that is not known.
        why: Why it was taken.
    """

    platform: str
    kind: str
    gpu: Gpu | None
    why: str

    @property
    def name(self) -> str:
        """Platform and kind, for people."""
        return f"{self.platform}: {self.kind}"

    def __str__(self) -> str:
        memory = ""
        if self.gpu is not None:
            memory = f", {self.gpu.total_bytes / 2**30:.1f} GiB, {self.gpu.free_bytes / 2**30:.1f} GiB free"
        return f"{self.name}{memory}; {self.why}"


def open_device(mem_fraction: float) -> Device:
    """Starts JAX on one device, which takes a moment, and leaves the environment as it was.

    Args:
        mem_fraction: Part of a GPU's whole memory that JAX may reserve.

    Raises:
        ConfigError: The platform that JAX was told to use does not start.
        MemoryPlanError: Other processes hold nearly all of every GPU's memory.
    """
    if xla_bridge.backends_are_initialized():
        choice = Choice(gpu=None, why="JAX had started before, with the memory that it took then", environment={})
        gpus = ()
    else:
        gpus = find_gpus() if _may_use_cuda(os.environ) else ()
        try:
            choice = choose(gpus, mem_fraction, os.environ)
        except MemoryPlanError:
            if _has_cuda_plugin():
                raise
            choice = choose((), mem_fraction, os.environ)  # JAX cannot use a GPU, so it matters to nobody who does
    try:
        with _environment(choice.environment):
            device = jax.devices()[0]
    except RuntimeError as error:
        raise ConfigError(
            f"JAX must find a device of JAX_PLATFORMS={_platforms()}, but could not start one; unset it, or repair the "
            "device's driver"
        ) from error
    if device.platform == "cpu":
        if gpus:
            logger.warning(_why_no_gpu(gpus[0]))
        return Device(platform="cpu", kind=device.device_kind, gpu=None, why="JAX has no other device")
    if device.platform == "gpu" and (count := len(jax.local_devices())) > 1:
        logger.warning(
            f"JAX sees {count} GPUs and reserves memory on each, but an engine uses the first only; "
            f"set {VISIBLE} to one of them"
        )
    return Device(platform=device.platform, kind=device.device_kind, gpu=choice.gpu, why=choice.why)


def choose(gpus: tuple[Gpu, ...], mem_fraction: float, environment: Mapping[str, str]) -> Choice:
    """The GPU with the most free memory, unless the user has chosen; of its memory what is asked for and is free.

    Args:
        gpus: What there is.
        mem_fraction: Part of a GPU's whole memory that is asked for.
        environment: What the user has set.

    Raises:
        MemoryPlanError: Other processes hold nearly all of every GPU's memory.
    """
    to_set: dict[str, str] = {}
    if VISIBLE in environment:
        gpu, why = _named(gpus, environment), f"{VISIBLE} names it"
    elif gpus:
        gpu = max(gpus, key=lambda gpu: (gpu.free_bytes, -gpu.index))
        why = f"of {len(gpus)} GPUs number {gpu.index} has the most free memory" if len(gpus) > 1 else "the only GPU"
        to_set[VISIBLE] = gpu.uuid
    else:
        gpu, why = None, "JAX's first device"
    given = next((name for name in FRACTIONS if name in environment), None)
    if given is not None:
        return Choice(gpu=gpu, why=f"{why}; {given} limits its memory", environment=to_set)
    fraction = mem_fraction if gpu is None else min(mem_fraction, (gpu.free_bytes - OUTSIDE_BYTES) / gpu.total_bytes)
    if gpu is not None and fraction <= 0:
        raise MemoryPlanError(
            f"the GPU {gpu.name} has {gpu.free_bytes / MIB:.0f} of {gpu.total_bytes / MIB:.0f} MiB free, which leaves "
            f"nothing beside the {OUTSIDE_BYTES / MIB:.0f} MiB that CUDA itself may need; end the processes that hold "
            f"its memory (nvidia-smi lists them), or name another GPU in {VISIBLE}"
        )
    if fraction < mem_fraction:
        why += f"; {fraction:.2f} of its memory is free to reserve, not the {mem_fraction:g} of --mem-fraction-static"
    return Choice(gpu=gpu, why=why, environment=to_set | {FRACTION: f"{fraction:.4f}"})


def find_gpus() -> tuple[Gpu, ...]:
    """What `nvidia-smi` lists; nothing where it is missing, fails, or says anything that is not understood."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
        return parse_gpus(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """The answer to `NVIDIA_SMI`. Raises ValueError for a line that is no GPU with its memory in whole MiB."""
    gpus = []
    for fields in csv.reader(text.splitlines(), skipinitialspace=True):
        index, uuid, name, total, free = (field.strip() for field in fields)
        gpu = Gpu(int(index), uuid, name, int(total) * MIB, int(free) * MIB)
        if not uuid.startswith("GPU-") or not 0 <= gpu.free_bytes <= gpu.total_bytes or not gpu.total_bytes:
            raise ValueError(f"no GPU: {fields}")
        gpus.append(gpu)
    return tuple(gpus)


def _named(gpus: tuple[Gpu, ...], environment: Mapping[str, str]) -> Gpu | None:
    """The first GPU that CUDA_VISIBLE_DEVICES names; None where that is not sure.

    A number is CUDA's, which counts the fastest kind first unless it is told otherwise; `nvidia-smi` counts by slot.
    """
    first = environment[VISIBLE].split(",")[0].strip()
    is_counted_alike = len({gpu.name for gpu in gpus}) == 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if first.isdecimal() and is_counted_alike:
        return next((gpu for gpu in gpus if gpu.index == int(first)), None)
    found = [gpu for gpu in gpus if first.startswith("GPU-") and gpu.uuid.startswith(first)]
    return found[0] if len(found) == 1 else None


def _may_use_cuda(environment: Mapping[str, str]) -> bool:
    is_hidden = environment.get(VISIBLE) in ("", "-1")
    return not is_hidden and (not _platforms() or not {"cuda", "gpu"}.isdisjoint(_platforms().split(",")))


def _platforms() -> str:
    """What JAX was told to use; empty for whatever it finds."""
    return jax.config.jax_platforms or ""


def _has_cuda_plugin() -> bool:
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def _why_no_gpu(gpu: Gpu) -> str:
    if _has_cuda_plugin():
        remedy = "JAX's CUDA plugin is installed but did not start: is the driver as new as its CUDA version needs?"
    else:
        remedy = "JAX for CUDA is not installed: pip install 'jsg[cuda]'"
    return f"this machine has an {gpu.name}, but JAX runs on the CPU. {remedy}"


@contextlib.contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables that were not set, and takes them away again: CUDA and JAX read them once, as they start."""
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del os.environ[name]
