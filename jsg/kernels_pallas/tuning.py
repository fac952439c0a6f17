"""Block sizes of the kernels: data, one file in `tuning/` per device."""

import functools
import importlib.resources
import json
import re
from typing import Any

import jax

FALLBACK = "nvidia-h200"


def sizes_for(kernel: str, *, rows: int, device: str | None = None) -> dict[str, int]:
    """Block sizes that a kernel should take.

    Args:
        kernel: Name of its file.
        rows: What the kernel's sizes go by, rows or tokens of the step. Of the entries that its file has, the one for
            the most rows that are not more than these counts.
        device: What JAX calls the device; None for the one that this trace is for. One that has no file takes the
            sizes of `FALLBACK`.
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
    """The kind of device of the abstract mesh that this trace runs under, else that of JAX's first device."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if device is None else device.device_kind
