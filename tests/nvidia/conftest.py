"""Tests that compile for NVIDIA cards, on any machine: `make test-nvidia`.

They need XLA's CUDA plugin. Where it is installed JAX starts differently, so it lies in a folder of its own: see
`ELSEWHERE` in `tests/conftest.py`.
"""

import pathlib
import shutil

import pytest

from bench.nvidia.plugin import use_plugin

HERE = pathlib.Path(__file__).parent
TOOLS = HERE.parent.parent / ".venv" / "nvidia" / "bin"


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("nvidia"):
        try:
            use_plugin()
        except RuntimeError as error:
            raise pytest.UsageError(str(error)) from None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Known: docs/packages/kernels_pallas.md, "The exit from a deprecated lowering".
    mark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
    for item in items:
        if str(item.path).startswith(f"{HERE}/"):  # comparing paths takes 50 times as long
            item.add_marker(mark)


@pytest.fixture(scope="session")
def nvdisasm() -> pathlib.Path:
    """NVIDIA's disassembler: that which `make test-nvidia` could fetch, or the machine's."""
    found = shutil.which("nvdisasm", path=str(TOOLS)) or shutil.which("nvdisasm")
    if found is None:
        pytest.skip("nvdisasm is at hand neither in .venv/nvidia/bin nor on the PATH")
    return pathlib.Path(found)
