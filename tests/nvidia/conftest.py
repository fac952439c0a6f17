"""Tests that compile for NVIDIA cards, on any machine: `make test-nvidia`.

They need XLA's CUDA plugin. Where it is installed JAX starts differently, so it lies in a folder of its own, and these
tests run in processes of their own: with `--nvidia`, and are skipped without it.
"""

import pathlib
import shutil

import pytest

from bench.nvidia.plugin import use_plugin

HERE = pathlib.Path(__file__).parent
TOOLS = HERE.parent.parent / ".venv" / "nvidia" / "bin"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nvidia", action="store_true", help="compile for NVIDIA cards; without XLA's CUDA plugin, fail")


def pytest_configure(config: pytest.Config) -> None:
    if not config.getoption("--nvidia", default=False):
        return
    try:
        use_plugin()
    except RuntimeError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Where all tests are collected, these would be imported and skipped one by one, in each worker."""
    is_asked_for = config.getoption("--nvidia", default=False) or config.args != config.getini("testpaths")
    return None if is_asked_for or collection_path.suffix != ".py" else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--nvidia", default=False):
        # Known: docs/packages/kernels_pallas.md, "The exit from a deprecated lowering".
        mark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
    else:
        mark = pytest.mark.skip(reason="compiled for NVIDIA cards by `make test-nvidia`")
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
