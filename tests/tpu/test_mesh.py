"""In which order the devices of a mesh stand, for the hosts that libtpu describes. No program is compiled."""

import itertools

import pytest

from jsg.engine.device import tpus


@pytest.mark.parametrize(
    ("name", "count", "links"), [("v5e", 4, 4), ("v5e", 8, 12), ("v6e", 4, 4), ("v5p", 4, 6), ("tpu7x", 8, 4)]
)
def test_one_way_around_a_mesh_takes_few_links(name: str, count: int, links: int):
    """In JAX's order it takes 6 in a square of chips and 14 in two; two devices of a chip of v7x need none."""
    ring = list(tpus.mesh_of(name, count).devices.flat)
    in_order = sorted(ring, key=lambda device: device.id)
    assert length(ring) == links <= length(in_order)


def length(devices: list) -> int:
    pairs = itertools.pairwise([*devices, devices[0]])
    return sum(abs(a - b) for one, other in pairs for a, b in zip(one.coords, other.coords, strict=True))
