"""What each of several engines gets of a machine: GPUs, memory and a folder for traces.

A single engine chooses its GPU when it starts JAX (`device/devices.py`). Several engines start at the same time and
would all find that the same GPU has the most free memory. So the front chooses for them.
"""

import dataclasses
import importlib.util
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jsg.config import EngineConfig
from jsg.engine.nvidia_smi import VISIBLE, find_gpus, has_cuda_plugin, may_use_cuda, most_free
from jsg.errors import ConfigError


def device_groups(dp_size: int, tp_size: int, environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Variables for the environment of each of `dp_size` engines, which give it `tp_size` devices of its own.

    There are none for a single engine, which chooses for itself, and none on a CPU, which all engines share.

    Raises:
        ConfigError: There are too few GPUs of one kind, or the devices are TPUs.
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
    """The options of each engine, given its variables. Engines without devices of their own share the memory.

    Each of several engines has its own folder for traces, because the files have the same names.
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
    """CUDA's names of the GPUs for all engines, at most `count`."""
    if VISIBLE in environment:
        return _listed(environment[VISIBLE])[:count]
    gpus = most_free(found, count) if (found := find_gpus()) else ()
    return [gpu.uuid for gpu in gpus]


def _listed(value: str) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES. CUDA stops reading at a negative number.

    Raises:
        ConfigError: A name stands there twice, so two engines would have that GPU.
    """
    names = [name for part in value.split(",") if (name := part.strip())]
    names = list(itertools.takewhile(lambda name: not name.startswith("-"), names))
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ConfigError(f"{VISIBLE} must name each GPU once, but names {twice[0]} several times")
    return names
