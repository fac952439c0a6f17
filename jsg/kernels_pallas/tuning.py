"""Block sizes of the kernels. They are data, in a file in `tuning/` for each class of devices."""

import functools
import importlib.resources
import json
from typing import Any

import jax

OTHER = "other"
"""The file for devices that no file names. Its sizes fit into the least shared memory that a supported device has."""


def sizes_for(kernel: str, *, rows: int, device: str | None = None) -> dict[str, int]:
    """The block sizes of a kernel.

    Args:
        kernel: Its name in the file.
        rows: The rows or tokens of the step by which the kernel's sizes are chosen: those of the entry with the most
            rows that are not more than these.
        device: JAX's name of the device; None for the device of this trace.
    """
    tables = _tables(device or _target_device())[kernel]
    chosen = max((entry for entry in tables if entry["rows"] <= rows), key=lambda entry: entry["rows"])
    return {name: size for name, size in chosen.items() if name != "rows"}


@functools.cache
def _tables(device: str) -> dict[str, Any]:
    """The sizes in the file that names the device by a beginning of its name."""
    folder = importlib.resources.files("jsg.kernels_pallas") / "tuning"
    files = [json.loads(file.read_text("utf-8")) for file in folder.iterdir() if file.name.endswith(".json")]
    named = [content for content in files if device.startswith(tuple(content["devices"]))]
    return (named or [json.loads((folder / f"{OTHER}.json").read_text("utf-8"))])[0]["kernels"]


def _target_device() -> str:
    """The device kind of the abstract mesh that this trace runs under, else of JAX's first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind
