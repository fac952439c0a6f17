"""In which order the devices of a mesh stand, for TPUs and GPUs that are not here."""

import dataclasses
import itertools
import math

import jax
import pytest

from jsg.models.tensor_parallel import in_ring, make_mesh


@dataclasses.dataclass(frozen=True)
class Chip:
    """A device as JAX shows it."""

    id: int
    coords: tuple[int, int, int]
    core_on_chip: int = 0
    device_kind: str = "TPU v5 lite"
    platform: str = "tpu"
    process_index: int = 0


def chips(width: int, height: int, **fields: str) -> list[Chip]:
    """A board in JAX's order: by rows."""
    return [Chip(y * width + x, (x, y, 0), **fields) for y in range(height) for x in range(width)]


def length(devices: list[Chip]) -> int:
    """The links that one way around these devices takes."""
    pairs = itertools.pairwise([*devices, devices[0]])
    return sum(round(math.dist(a.coords, b.coords) ** 2) for a, b in pairs)


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite"])
@pytest.mark.parametrize("groups", [1, 2])
def test_neighbours_of_a_mesh_are_joined_by_a_link(kind: str, groups: int):
    board = chips(2, 4, device_kind=kind)[:4]  # half of a host
    mesh = in_ring(board, groups)
    assert mesh.shape == (groups, 4 // groups)
    ring = list(mesh.flat)
    assert sorted(ring, key=lambda chip: chip.id) == board
    assert length(ring) == 4 < length(board)


def test_what_is_no_box_and_what_is_no_tpu_stays_in_order():
    for devices in (chips(2, 2)[:3], chips(2, 2, platform="gpu", device_kind="NVIDIA H200")):
        assert list(in_ring(devices).flat) == devices


def test_a_mesh_takes_the_first_devices(monkeypatch: pytest.MonkeyPatch):
    board = chips(2, 4)
    monkeypatch.setattr(jax, "local_devices", lambda host: board)
    monkeypatch.setattr(jax, "process_count", lambda: 1)
    mesh = make_mesh(4, 2)
    assert mesh is not None and [chip.id for chip in mesh.devices.flat] == [0, 1, 3, 2]
    assert make_mesh(1) is None
