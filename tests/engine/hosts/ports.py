"""Ports for the address at which hosts meet: the named port, and the next one, on which JAX's coordinator listens."""

import contextlib
import random
import socket

LEAST, MOST = 20_000, 32_000
"""Systems give away ports from 32768 on, to every connection of every process."""


def free_address() -> str:
    """An address on loopback on whose port, and on the next port, no program listens."""
    while True:
        port = random.SystemRandom().randrange(LEAST, MOST)
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            for each in (port, port + 1):
                opened.enter_context(socket.create_server(("127.0.0.1", each)))
            return f"127.0.0.1:{port}"
