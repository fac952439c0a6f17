"""The GPUs of a machine as `nvidia-smi` tells of them, and what of a machine each of several engines gets. No JAX here.

One engine chooses for itself, as it starts JAX (`device.py`). Several start at the same time, and would all find the
same GPU to have the most free memory: so the front chooses once, and shows each child a group of its own.
"""

import csv
import dataclasses
import importlib.util
import itertools
import os
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jsg.config import EngineConfig
from jsg.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=index,uuid,name,memory.total,memory.free", "--format=csv,noheader,nounits")
NVIDIA_SMI_TIMEOUT_S = 20.0  # a driver that has to wake up first takes seconds
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


def most_free(gpus: tuple[Gpu, ...], count: int) -> tuple[Gpu, ...]:
    """So many GPUs of one kind, or all of the kind that there are most of; in the order of their numbers."""
    by_kind = [
        sorted((gpu for gpu in gpus if gpu.name == name), key=lambda gpu: (-gpu.free_bytes, gpu.index))[:count]
        for name in {gpu.name: None for gpu in gpus}
    ]
    best = max(by_kind, key=lambda kind: (len(kind), kind[-1].free_bytes, -kind[-1].index))
    return tuple(sorted(best, key=lambda gpu: gpu.index))


def named_gpus(gpus: tuple[Gpu, ...], environment: Mapping[str, str], count: int) -> tuple[Gpu, ...]:
    """The first GPUs that CUDA_VISIBLE_DEVICES names, as many as are used; none where one of them is not sure.

    A number is CUDA's, which counts the fastest kind first unless it is told otherwise; `nvidia-smi` counts by slot.
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
    """Whether JAX looks for NVIDIA GPUs. `platforms` is what it was told to use; empty for whatever it finds."""
    is_hidden = environment.get(VISIBLE) in ("", "-1")
    return not is_hidden and (not platforms or not {"cuda", "gpu"}.isdisjoint(platforms.split(",")))


def has_cuda_plugin() -> bool:
    """Whether JAX for CUDA is installed."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def device_groups(dp_size: int, tp_size: int, environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """What to add to the environment of each of `dp_size` engines, so that each has `tp_size` devices of its own.

    Nothing where there is one engine, which chooses for itself, and on a CPU, which all of them share.

    Raises:
        ConfigError: There are fewer GPUs of one kind, or the devices are TPUs.
    """
    if dp_size == 1:
        return [{}]
    platforms = environment.get("JAX_PLATFORMS", "")
    if importlib.util.find_spec("libtpu") is not None and (not platforms or "tpu" in platforms.split(",")):
        raise ConfigError(
            f"--dp-size must be 1 on a TPU, of which a process opens all chips, but got {dp_size}; start a server on "
            "each machine, or set JAX_PLATFORMS where this one has no TPU"
        )
    if not may_use_cuda(environment, platforms) or not has_cuda_plugin():
        return [{} for _ in range(dp_size)]
    names = _group_names(dp_size * tp_size, environment)
    if not names and VISIBLE not in environment:
        raise ConfigError(
            f"--dp-size {dp_size} needs to know the GPUs, but nvidia-smi lists none; name them in {VISIBLE}, or set "
            "JAX_PLATFORMS=cpu for engines that share the CPU"
        )
    if len(names) < dp_size * tp_size:
        where = f"{VISIBLE} names" if VISIBLE in environment else "this machine has"
        raise ConfigError(
            f"--dp-size {dp_size} with --tp-size {tp_size} needs {dp_size * tp_size} GPUs of one kind, but {where} "
            f"{len(names)}; lower one of them"
        )
    return [{VISIBLE: ",".join(names[i * tp_size : (i + 1) * tp_size])} for i in range(dp_size)]


def engine_configs(config: EngineConfig, groups: Sequence[Mapping[str, str]]) -> list[EngineConfig]:
    """The knobs of each of the engines that have these groups: without devices of their own they share the memory.

    Each of several has a folder of its own for a trace, whose files would have the same names.
    """
    if len(groups) == 1:
        return [config]
    fraction = config.mem_fraction_static if groups[0] else config.mem_fraction_static / len(groups)
    configs = []
    for number in range(len(groups)):
        trace = None if config.profile_dir is None else str(Path(config.profile_dir) / f"engine-{number}")
        configs.append(dataclasses.replace(config, mem_fraction_static=fraction, profile_dir=trace))
    return configs


def _group_names(count: int, environment: Mapping[str, str]) -> list[str]:
    """What CUDA calls the GPUs to share out, at most `count`."""
    if VISIBLE in environment:
        return _listed(environment[VISIBLE])[:count]
    gpus = most_free(found, count) if (found := find_gpus()) else ()
    return [gpu.uuid for gpu in gpus]


def _listed(value: str) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES. CUDA goes no further than a number below 0.

    Raises:
        ConfigError: One stands there twice, so two engines would have it.
    """
    names = [name for part in value.split(",") if (name := part.strip())]
    names = list(itertools.takewhile(lambda name: not name.startswith("-"), names))
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ConfigError(f"{VISIBLE} must name each GPU once, but names {twice[0]} several times")
    return names
