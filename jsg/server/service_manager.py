"""What systemd learns of a server that it has started as `Type=notify` (sd_notify(3)).

`systemctl start` and `restart` then return when the server is ready, so that one command after the other is a rolling
restart. NOTIFY_SOCKET is systemd's own variable, which nobody else sets.
"""

import contextlib
import os
import socket

READY = "READY=1"
STOPPING = "STOPPING=1"


def notify(state: str) -> None:
    """Tells systemd a state; does nothing where systemd did not ask for it."""
    with contextlib.suppress(KeyError, OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        address = os.environ["NOTIFY_SOCKET"]
        sender.sendto(state.encode(), "\0" + address[1:] if address.startswith("@") else address)
