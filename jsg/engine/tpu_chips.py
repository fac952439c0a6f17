"""The TPU chips of a machine, and what shows some of them to a process.

One process opens all chips of a machine unless variables name some, which must form a box. Sources: JAX's list of PCI
devices (`jax/_src/hardware_utils.py`), libtpu's lock (XLA's `tpu_initializer_helper.cc`), and what JAX's authors, Ray
and vLLM set. No engine of jsg has started on a TPU yet, so only what a process is given is tested.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

VISIBLE = "TPU_VISIBLE_CHIPS"
PCI_DEVICES = Path("/sys/bus/pci/devices")
GOOGLE = "0x1ae0"
DEVICES_OF_CHIP = {"0x0027": 2, "0x005e": 1, "0x0062": 1, "0x0063": 1, "0x006f": 1, "0x0076": 2}
"""By PCI device, how many devices JAX sees of a chip: v2 and v3, v4, v5p, v5e, v6e, v7x."""
BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1"}
"""By the number of chips, the box that a process has."""


def chip_devices() -> list[int]:
    """For each TPU chip of this machine how many devices JAX sees of it."""
    found = []
    for vendor in PCI_DEVICES.glob("*/vendor"):
        device = vendor.with_name("device").read_text(encoding="ascii").strip()
        if vendor.read_text(encoding="ascii").strip() == GOOGLE and device in DEVICES_OF_CHIP:
            found.append(DEVICES_OF_CHIP[device])
    return found


def has_libtpu() -> bool:
    """Whether JAX for TPUs is installed, which does not mean that there is one."""
    return importlib.util.find_spec("libtpu") is not None


def may_use_tpu(environment: Mapping[str, str], platforms: str) -> bool:
    """Whether JAX will open a TPU. `platforms` are those that JAX was told to use; empty for any."""
    if not has_libtpu() or (platforms and "tpu" not in platforms.split(",")):
        return False
    return bool(platforms) or VISIBLE in environment or bool(chip_devices())


def shown(chips: Sequence[str], port: int) -> dict[str, str]:
    """Variables for a process that has these chips to itself, which form a box. libtpu listens at the port.

    It takes a box of 2 × 2 for a whole host, which only one process has, unless it is told that several may load it.
    """
    return {
        VISIBLE: ",".join(chips),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": BOUNDS[len(chips)],
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": f"localhost:{port}",
        "TPU_PROCESS_PORT": str(port),
        "CLOUD_TPU_TASK_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
