"""Ports for servers that are started by a command line and so cannot ask the system for one themselves."""

import random
import socket
from pathlib import Path

EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
LOWEST_PORT = 15_000  # well-known servers have most of the ports below
LARGEST_PORT = 65_535
TRIES = 100


def free_ports(address: str = "127.0.0.1", count: int = 1) -> int:
    """The first of `count` successive ports of an address that nobody uses now.

    The ports are none that the system gives to outgoing connections. A port of those could be taken by any connection
    of any process before the server listens at it, and a server of several ports would meet that often.

    Raises:
        OSError: No such ports were found.
    """
    lowest, highest = _not_ephemeral()
    for _ in range(TRIES):
        first = random.SystemRandom().randint(lowest, highest - count + 1)
        if all(_is_free(address, port) for port in range(first, first + count)):
            return first
    raise OSError(f"{address} has no {count} free ports in a row between {lowest} and {highest}")


def _not_ephemeral() -> tuple[int, int]:
    """The larger of the two ranges below and above those of outgoing connections, or all where there is neither."""
    try:
        low, high = (int(word) for word in EPHEMERAL_RANGE.read_text().split())
    except (OSError, ValueError):
        low, high = 49_152, LARGEST_PORT  # RFC 6335, section 6
    below, above = (LOWEST_PORT, low - 1), (high + 1, LARGEST_PORT)
    largest = max(below, above, key=lambda ports: ports[1] - ports[0])
    return largest if largest[1] - largest[0] >= TRIES else (LOWEST_PORT, LARGEST_PORT)


def _is_free(address: str, port: int) -> bool:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
