"""Addresses at which hosts reach each other."""

import fcntl
import ipaddress
import socket
import struct

from jsg.errors import ConfigError

SIOCGIFADDR = 0x8915  # of Linux, <linux/sockios.h>


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of `--dist-init-addr`. An IPv6 host is in brackets.

    Raises:
        ConfigError: It is not HOST:PORT, names every interface, or leaves no port for JAX's coordinator after it.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdecimal() or not 1 <= int(port) < 65535:
        raise ConfigError(
            f"--dist-init-addr must be HOST:PORT with a port in [1, 65534], but got {text!r}; name an address of the "
            "leader, such as 10.0.0.1:20000"
        )
    try:
        is_any = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_any = host == "*"
    if is_any:
        raise ConfigError(
            f"--dist-init-addr must be an address of the leader that the others reach, but {host} means all of them; "
            "name one: nothing listens on any other"
        )
    return host, int(port)


def interface_of(address: str) -> str | None:
    """The network interface with this IPv4 address, for NCCL; None where none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
