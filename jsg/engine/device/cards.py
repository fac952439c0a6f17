"""The NVIDIA cards that programs are compiled for. XLA's CUDA plugin needs no GPU to compile, only a description."""

import dataclasses
import functools
import re

from jax.experimental import topologies
from jax.sharding import Mesh

from jsg.engine.device.targets import TARGETS, Target
from jsg.errors import ConfigError
from jsg.extras import install_command
from jsg.models.tensor_parallel import AXES

NAMES = tuple(sorted(file.stem for file in TARGETS.glob("*.txtpb")))
CLASSES = {"sm_80": "a100_80gb", "sm_89": "l4", "sm_90": "h200", "sm_100": "b200", "sm_120": "rtx5090"}
"""The card of each class for which CI compiles. What has compute capability 8.6 lacks e4m3, and is else like an L4."""
KNOWN_TO_JAX = {
    (8, 0): "NVIDIA A100",
    (8, 6): "NVIDIA A10",
    (8, 9): "NVIDIA L4",
    (9, 0): "NVIDIA H200",
    (10, 0): "NVIDIA B200",
    (12, 0): "NVIDIA RTX PRO 6000",
}
"""A card of each compute capability that JAX knows by name. Without a device, it knows some cards only."""


@dataclasses.dataclass(frozen=True, slots=True)
class Card:
    """A card as its description has it.

    Attributes:
        name: The name of the file.
        capability: Compute capability, such as (9, 0).
        shared_bytes: The shared memory that one thread block may use.
        memory_bytes: Its memory.
        description: What XLA needs, with the name of a card of this capability that JAX knows.
    """

    name: str
    capability: tuple[int, int]
    shared_bytes: int
    memory_bytes: int
    description: str

    @property
    def target(self) -> Target:
        """The card as something to compile for."""
        return Target(
            name=self.name,
            platform="gpu",
            kind=self.name,
            memory_bytes=self.memory_bytes,
            mesh=functools.partial(mesh_of, self.name),
            capability=self.capability,
        )


@functools.cache
def card(name: str) -> Card:
    """The card of this name, one of `NAMES`."""
    text = TARGETS.joinpath(f"{name}.txtpb").read_text(encoding="utf-8")
    major, minor = (_number(text, part, 0) for part in ("major", "minor"))
    kind = KNOWN_TO_JAX[major, minor]
    description = re.sub(r'^(device_description_str|  name): ".*"', rf'\1: "{kind}"', text, flags=re.MULTILINE)
    shared, memory = (_number(text, field) for field in ("shared_memory_per_block_optin", "device_memory_size"))
    return Card(name, (major, minor), shared, memory, description)


def mesh_of(name: str, num_devices: int = 1, num_groups: int = 1) -> Mesh:
    """A mesh of such cards, none of which is here, in the form of `jsg.models.tensor_parallel.make_mesh`.

    Raises:
        ConfigError: XLA's CUDA plugin is not installed, or had no chance to start.
    """
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=card(name).description, topology=f"1x1x{num_devices}"
        )
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            "compiling for NVIDIA cards needs XLA's CUDA plugin, but JAX does not find it: "
            f"{install_command('cuda')}, or jax-cuda13-plugin and jax-cuda13-pjrt alone, and use a new process "
            f"({error})"
        ) from error
    return topologies.make_mesh(topology, (num_groups, num_devices // num_groups), AXES)


def _number(text: str, field: str, default: int | None = None) -> int:
    """The first number of this field: the compute capability comes before the version of what runs it."""
    found = re.search(rf"\b{field}: (\d+)", text)
    if found is None and default is not None:
        return default  # a field of zero is not written
    assert found is not None, f"the description has no {field}"
    return int(found[1])
