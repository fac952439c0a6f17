"""jsg: a JAX/XLA serving stack for language-model programs.

Public names are loaded when they are first read (PEP 562), so `import jsg` costs nothing and loads no JAX.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Engine": "jsg.engine.offline",
    "SamplingParams": "jsg.types",
}

__all__ = ["Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'jsg' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
