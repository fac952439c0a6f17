"""The GPUs of a machine as `nvidia-smi` lists them, and which of them an engine takes."""

import csv
import dataclasses
import importlib.util
import subprocess
from collections.abc import Mapping

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
NVIDIA_SMI_TIMEOUT_S = 20.0  # a driver that wakes up first takes seconds
MIB = 2**20


@dataclasses.dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as `nvidia-smi` sees it."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int


def find_gpus() -> tuple[Gpu, ...]:
    """The GPUs that `nvidia-smi` lists; none where it is missing, fails, or prints something unknown."""
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=True)
        return parse_gpus(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Parses the output of `NVIDIA_SMI`. Raises ValueError for a line that is no GPU with its memory in whole MiB."""
    gpus = []
    for fields in csv.reader(text.splitlines(), skipinitialspace=True):
        index, uuid, name, total, free = (field.strip() for field in fields)
        gpu = Gpu(int(index), uuid, name, int(total) * MIB, int(free) * MIB)
        if not uuid.startswith("GPU-") or not 0 <= gpu.free_bytes <= gpu.total_bytes or not gpu.total_bytes:
            raise ValueError(f"no GPU: {fields}")
        gpus.append(gpu)
    return tuple(gpus)


def most_free(gpus: tuple[Gpu, ...], count: int) -> tuple[Gpu, ...]:
    """The `count` freest GPUs of one kind, or all of the commonest kind where there are fewer; ordered by number."""
    by_kind = [
        sorted((gpu for gpu in gpus if gpu.name == name), key=lambda gpu: (-gpu.free_bytes, gpu.index))[:count]
        for name in {gpu.name: None for gpu in gpus}
    ]
    best = max(by_kind, key=lambda kind: (len(kind), kind[-1].free_bytes, -kind[-1].index))
    return tuple(sorted(best, key=lambda gpu: gpu.index))


def named_gpus(gpus: tuple[Gpu, ...], environment: Mapping[str, str], count: int) -> tuple[Gpu, ...]:
    """The first `count` GPUs that CUDA_VISIBLE_DEVICES names; none where a name is not certain.

    CUDA counts the fastest kind first unless it is told otherwise, but `nvidia-smi` counts by slot.
    """
    is_counted_alike = len({gpu.name for gpu in gpus}) == 1 or environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    used: list[Gpu] = []
    for name in environment[VISIBLE].split(",")[:count]:
        name = name.strip()
        if name.isdecimal() and is_counted_alike:
            found = [gpu for gpu in gpus if gpu.index == int(name)]
        else:
            found = [gpu for gpu in gpus if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if len(found) != 1:
            return ()
        used += found
    return tuple(used)


def may_use_cuda(environment: Mapping[str, str], platforms: str) -> bool:
    """Whether JAX looks for NVIDIA GPUs. `platforms` are those that JAX was told to use; empty for any."""
    is_hidden = environment.get(VISIBLE) in ("", "-1")
    return not is_hidden and (not platforms or not {"cuda", "gpu"}.isdisjoint(platforms.split(",")))


def has_cuda_plugin() -> bool:
    """Whether JAX for CUDA is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
