"""Tests that compile for TPUs, on any machine: `make test-tpu`.

They need libtpu, which is no part of the environment: see `ELSEWHERE` in `tests/conftest.py`.
"""

import importlib.util

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("tpu") and importlib.util.find_spec("libtpu") is None:
        raise pytest.UsageError("libtpu must be on PYTHONPATH; `make test-tpu` puts it into .venv/tpu")
