"""Many `jsg serve` behind one address, by Ray Serve: `serve run jsg.ray:build model=DIR replicas=4`."""

from typing import Any


def __getattr__(name: str) -> Any:
    """Loads `build` when it is read (PEP 562): most modules of this package need no Ray."""
    if name != "build":
        raise AttributeError(f"module 'jsg.ray' has no attribute {name!r}")
    from jsg.ray.app import build

    return build
