"""JAX on several hosts: one program runs on the devices of all of them.

JAX's coordinator listens at the port after that of `--dist-init-addr`, and on that address only; by default it takes
all interfaces. The libraries that add up between hosts get the interface that faces the leader: gloo on CPUs, which
would take whatever the host's name resolves to, and NCCL on GPUs, unless NCCL_SOCKET_IFNAME is set.
"""

import logging
import math
import os
import socket
import time

import jax
from jax._src import distributed, xla_bridge  # JAX has no public way to say where gloo listens
from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

from jsg.engine.hosts.address import interface_of, parse_address
from jsg.errors import ConfigError

logger = logging.getLogger(__name__)

NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
START_S = 60
END_S = 5
HEARTBEAT_S = 100  # JAX's default
RETRY_S = 1.0


def connect(address: str, *, num_hosts: int, rank: int, own_address: str, timeout_s: float) -> None:
    """Joins this process to those of the other hosts. Call it once, before JAX looks for a device.

    Args:
        address: `--dist-init-addr`.
        num_hosts: All hosts.
        rank: The number of this host.
        own_address: The address at which the others reach this host.
        timeout_s: `--dist-timeout`. JAX waits longer, because it ends a process without a message.

    Raises:
        ConfigError: The port after that of the address is not free on the leader, or another host cannot reach it.
    """
    host, port = parse_address(address)
    coordinator = f"[{host}]:{port + 1}" if ":" in host else f"{host}:{port + 1}"
    if NCCL_INTERFACE not in os.environ and (name := interface_of(own_address)) is not None:
        os.environ[NCCL_INTERFACE] = f"={name}"
    jax.config.update("jax_enable_preemption_service", False)  # it would catch SIGTERM
    if rank > 0:
        _wait_for_coordinator(host, port + 1)
    try:
        jax.distributed.initialize(
            coordinator,
            num_hosts,
            rank,
            cluster_detection_method="deactivate",
            initialization_timeout=START_S,
            heartbeat_timeout_seconds=max(HEARTBEAT_S, math.ceil(2 * timeout_s)),
            shutdown_timeout_seconds=END_S,
            coordinator_bind_address=coordinator,
        )
    except RuntimeError as error:
        raise ConfigError(_no_coordinator(coordinator, error)) from None

    def make_client():  # noqa: ANN202 # of jaxlib
        client = distributed.global_state.client
        return xla_bridge.make_cpu_client(_jax.make_gloo_tcp_collectives(client, hostname=own_address))

    xla_bridge.register_backend_factory("cpu", make_client, priority=0, fail_quietly=False)


def _wait_for_coordinator(host: str, port: int) -> None:
    """Waits until the coordinator answers, because JAX would abort the process if it does not."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection((host, port), RETRY_S).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(_no_coordinator(f"{host} with {port}", error)) from None
            time.sleep(RETRY_S)


def _no_coordinator(where: str, error: Exception) -> str:
    return (
        "the port behind that of --dist-init-addr must be free on the leader, and every host must reach it, but "
        f"{where} gave: {error}; name another address, or open that port between the hosts"
    )


def disconnect() -> None:
    """Leaves together with the other hosts, or alone if they do not come."""
    try:
        jax.distributed.shutdown()
    except RuntimeError as error:
        logger.warning("the hosts did not end together: %s", error)
