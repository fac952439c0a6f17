"""What keeps JAX from starting on several hosts is an error of ours, where JAX would end the process."""

from typing import Any

import jax
import pytest

from jsg.engine.hosts import distributed
from jsg.errors import ConfigError
from tests.engine.hosts.ports import free_address


@pytest.fixture(autouse=True)
def same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process goes on without other hosts."""
    monkeypatch.setenv(distributed.NCCL_INTERFACE, "=lo")
    monkeypatch.setattr(distributed.jax.config, "update", lambda name, value: None)
    monkeypatch.setattr(distributed.xla_bridge, "register_backend_factory", lambda *args, **options: None)


def connect(rank: int, timeout_s: float = 8.0) -> None:
    distributed.connect(free_address(), num_hosts=2, rank=rank, own_address="127.0.0.1", timeout_s=timeout_s)


def test_a_coordinator_that_is_not_reached_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(distributed, "START_S", 0.1)
    with pytest.raises(ConfigError, match=r"the port behind that .* must be free .* Connection refused"):
        connect(rank=1)


def test_what_jax_says_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("no address added")

    monkeypatch.setattr(jax.distributed, "initialize", fail)
    with pytest.raises(ConfigError, match=r"every host must reach it, but .* gave: no address added"):
        connect(rank=0)


@pytest.mark.parametrize(("timeout_s", "least_s"), [(8.0, 100), (1e6, 2_000_000)])
def test_jax_waits_for_longer_than_we_do(monkeypatch: pytest.MonkeyPatch, timeout_s: float, least_s: int):
    told: dict[str, Any] = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *args, **options: told.update(options))
    connect(rank=0, timeout_s=timeout_s)
    assert told["heartbeat_timeout_seconds"] == least_s
