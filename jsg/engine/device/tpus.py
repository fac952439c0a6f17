"""The TPUs that programs are compiled for. libtpu needs none to compile, only the name of a topology.

The memory in a description is what libtpu says that a program may have (0.0.48.1, in its error for one that needs
more), which is a little less than what is published. No program that was compiled so has run.
"""

import functools
import json
import math
import os
from typing import Any

from jax.experimental import topologies
from jax.sharding import Mesh

from jsg.engine.device.targets import TARGETS, Target
from jsg.errors import ConfigError
from jsg.extras import install_command
from jsg.models.tensor_parallel import AXES, in_ring

NAMES = tuple(sorted(file.stem for file in TARGETS.glob("*.json")))
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""With these libtpu does not ask the network which machine this is, and lets several processes of a machine in."""


def target(name: str) -> Target:
    """The TPU of this name, one of `NAMES`."""
    described = _description(name)
    return Target(
        name=name,
        platform="tpu",
        kind=described["kind"],
        memory_bytes=described["memory_mib"] * 2**20,
        mesh=functools.partial(mesh_of, name),
    )


def mesh_of(name: str, num_devices: int = 1, num_groups: int = 1) -> Mesh:
    """A mesh of such TPUs: the first devices of the smallest host that has as many.

    Raises:
        ConfigError: libtpu is not installed, or no host has so many.
    """
    described = _description(name)
    hosts = {math.prod(bounds) * described["devices_per_chip"]: bounds for bounds in described["hosts"]}
    count = min((count for count in hosts if count >= num_devices), default=None)
    if count is None:
        raise ConfigError(
            f"--tp-size must be at most {max(hosts)}, the devices of a host of {name}, but got {num_devices}"
        )
    os.environ.update(ENVIRONMENT)
    bounds = tuple(hosts[count])
    try:
        devices = topologies.get_topology_desc(
            f"{name}:{'x'.join(map(str, bounds))}", platform="tpu", chips_per_host_bounds=bounds
        ).devices
    except RuntimeError as error:
        raise ConfigError(
            f"compiling for TPUs needs libtpu, but JAX cannot use one: {install_command('tpu')}, or libtpu alone, and "
            f"use a new process ({error})"
        ) from error
    return Mesh(in_ring(devices[:num_devices], num_groups), AXES)


@functools.cache
def _description(name: str) -> dict[str, Any]:
    return json.loads(TARGETS.joinpath(f"{name}.json").read_text(encoding="utf-8"))
