"""Block sizes of the kernels. They are data, in a file in `tuning/` for each device."""

import functools
import importlib.resources
import json
import re
from typing import Any

import jax

FALLBACK = "nvidia-h200"


def sizes_for(kernel: str, *, rows: int, device: str | None = None) -> dict[str, int]:
    """The block sizes of a kernel.

    Args:
        kernel: Its name in the file.
        rows: The rows or tokens of the step by which the kernel's sizes are chosen: those of the entry with the most
            rows that are not more than these.
        device: JAX's name of the device; None for the device of this trace. A device without a file has the sizes of
            `FALLBACK`.
    """
    tables = _tables(re.sub(r"[^a-z0-9]+", "-", (device or _target_device()).lower()))[kernel]
    chosen = max((entry for entry in tables if entry["rows"] <= rows), key=lambda entry: entry["rows"])
    return {name: size for name, size in chosen.items() if name != "rows"}


@functools.cache
def _tables(device: str) -> dict[str, Any]:
    folder = importlib.resources.files("jsg.kernels_pallas") / "tuning"
    file = folder / f"{device}.json"
    return json.loads((file if file.is_file() else folder / f"{FALLBACK}.json").read_text("utf-8"))["kernels"]


def _target_device() -> str:
    """The device kind of the abstract mesh that this trace runs under, else of JAX's first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind
