"""What programs are compiled for where it is not here: `cards.py` has NVIDIA's cards, and `tpus.py` Google's chips.

A compiler needs none of them, only a description. A file in `targets/` has that of each, and says where it is from.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from jsg.engine.device.devices import Device

TARGETS = pathlib.Path(__file__).with_name("targets")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A kind of device, as its description has it.

    Attributes:
        name: The name of the file, for `--target`.
        platform: JAX's name of its platform.
        kind: The name that the device gives itself; of a card the name of the file.
        memory_bytes: The memory of one device.
        mesh: Makes a mesh of so many devices in so many groups, in the form of `jsg.models.tensor_parallel.make_mesh`.
            It raises ConfigError where the compiler is not installed, or no host has so many devices.
        capability: See `Device`.
    """

    name: str
    platform: str
    kind: str
    memory_bytes: int
    mesh: Callable[[int, int], Mesh]
    capability: tuple[int, int] | None = None

    def device(self, count: int, why: str) -> Device:
        """So many of these devices, chosen for this reason."""
        return Device(
            platform=self.platform,
            kind=self.kind,
            gpu=None,
            why=why,
            count=count,
            capability=self.capability,
            described_bytes=self.memory_bytes,
        )


@contextlib.contextmanager
def traced_for(mesh: Mesh | None) -> Iterator[None]:
    """What is traced inside chooses kernels for the devices of the mesh; for JAX's own devices where it is None."""
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        yield
