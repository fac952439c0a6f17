"""What each of several engines gets of a machine: GPUs or TPU chips, memory and a folder for traces.

A single engine chooses its GPU when it starts JAX (`device/devices.py`). Several engines start at the same time and
would all find that the same GPU has the most free memory, or open all chips of a TPU. So the front chooses for them.
"""

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jsg.config import EngineConfig
from jsg.engine.nvidia_smi import VISIBLE, find_gpus, has_cuda_plugin, may_use_cuda, most_free
from jsg.engine.tpu_chips import BOUNDS, chip_devices, may_use_tpu, shown
from jsg.engine.tpu_chips import VISIBLE as CHIPS
from jsg.errors import ConfigError
from jsg.free_ports import free_ports


def device_groups(dp_size: int, tp_size: int, environment: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """Variables for the environment of each of `dp_size` engines, which give it `tp_size` devices of its own.

    There are none for a single engine, which chooses for itself, and none on a CPU, which all engines share.

    Raises:
        ConfigError: There are too few GPUs of one kind, or too few chips of a TPU.
    """
    if dp_size == 1:
        return [{}]
    platforms = environment.get("JAX_PLATFORMS", "")
    if may_use_tpu(environment, platforms):
        return _chip_groups(dp_size, tp_size, environment)
    if not may_use_cuda(environment, platforms) or not has_cuda_plugin():
        return [{} for _ in range(dp_size)]
    names = _group_names(dp_size * tp_size, environment)
    if not names and VISIBLE not in environment:
        raise ConfigError(
            f"--dp-size {dp_size} needs to know the GPUs, but nvidia-smi lists none; name them in {VISIBLE}, or set "
            "JAX_PLATFORMS=cpu for engines that share the CPU"
        )
    wanted = f"--dp-size {dp_size} with --tp-size {tp_size} needs {dp_size * tp_size} GPUs of one kind"
    _require(len(names) >= dp_size * tp_size, wanted, len(names), VISIBLE, environment)
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


def _chip_groups(dp_size: int, tp_size: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """As `device_groups`, of a TPU. An engine has whole chips, though JAX may see two devices of a chip."""
    found = chip_devices()
    chips = [str(number) for number in range(len(found))]
    if CHIPS in environment:
        chips = _listed(environment, CHIPS)
    size = -(-tp_size // max(found, default=1))
    if size not in BOUNDS:
        raise ConfigError(
            f"--dp-size {dp_size} gives each engine 1, 2 or 4 chips of a TPU, but --tp-size {tp_size} needs {size}; "
            "change it, or start a server on each machine"
        )
    wanted = f"--dp-size {dp_size} with --tp-size {tp_size} needs {dp_size * size} chips of a TPU"
    _require(len(chips) >= dp_size * size, wanted, len(chips), CHIPS, environment)
    port = free_ports(count=dp_size)
    return [shown(chips[i * size : (i + 1) * size], port + i) for i in range(dp_size)]


def _require(are_enough: bool, wanted: str, count: int, variable: str, environment: Mapping[str, str]) -> None:
    """Raises ConfigError where a variable, or else the machine, has too few devices."""
    if not are_enough:
        where = f"{variable} names" if variable in environment else "this machine has"
        raise ConfigError(f"{wanted}, but {where} {count}; lower one of them")


def _group_names(count: int, environment: Mapping[str, str]) -> list[str]:
    """CUDA's names of the GPUs for all engines, at most `count`."""
    if VISIBLE in environment:
        return _listed(environment, VISIBLE)[:count]
    gpus = most_free(found, count) if (found := find_gpus()) else ()
    return [gpu.uuid for gpu in gpus]


def _listed(environment: Mapping[str, str], variable: str) -> list[str]:
    """The names in a variable that lists devices. CUDA stops reading at a negative number.

    Raises:
        ConfigError: A name stands there twice, so two engines would have that device.
    """
    names = [name for part in environment[variable].split(",") if (name := part.strip())]
    names = list(itertools.takewhile(lambda name: not name.startswith("-"), names))
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        raise ConfigError(f"{variable} must name each device once, but names {twice[0]} several times")
    return names
