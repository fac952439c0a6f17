"""XLA's CUDA plugin, which compiles for GPUs on a machine that has none; `make test-nvidia` fetches it."""

import importlib.util
import os

PLUGIN = "jax_plugins.xla_cuda13"


def use_plugin() -> None:
    """Makes JAX, which must not have started yet, compile for a GPU that does not exist.

    Raises:
        RuntimeError: The plugin is not installed.
    """
    try:
        found = importlib.util.find_spec(PLUGIN)
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise RuntimeError("XLA's CUDA plugin must be on PYTHONPATH; `make test-nvidia` puts it into .venv/nvidia")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"  # there is no driver to ask
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # a program from a cache has no list of launches
