"""The wire between hosts: short JSON messages until they serve, then calls of programs.

A message is its length and its JSON. A call is the number of its program and the bytes of the program's arguments from
the host. Both sides know the shapes and types of these, so nothing has to be interpreted.
"""

import contextlib
import json
import math
import socket
import struct
import time
from collections.abc import Hashable, Sequence
from typing import Any, final

import numpy as np

MAX_MESSAGE_BYTES = 2**18
JOIN_BYTES = 2**16  # a call of at most so many bytes is sent as one packet

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("<i")
_END = -1


class WireError(ConnectionError):
    """The other side is gone, or is no host of jsg."""


def send_message(connection: socket.socket, message: dict[str, Any]) -> None:
    """Sends a JSON object."""
    text = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(text)) + text)


def receive_message(connection: socket.socket, within_s: float | None = None) -> dict[str, Any]:
    """Waits for the next JSON object, up to `within_s` if it is given.

    Raises:
        WireError: The connection has ended, or something else comes.
        TimeoutError: It does not come in time.
    """
    deadline = None if within_s is None else time.monotonic() + within_s
    (length,) = _LENGTH.unpack(receive_exactly(connection, _LENGTH.size, deadline))
    if length > MAX_MESSAGE_BYTES:
        raise WireError(f"a message must have at most {MAX_MESSAGE_BYTES} bytes, but has {length}")
    try:
        message = json.loads(receive_exactly(connection, length, deadline))
    except (ValueError, RecursionError):
        raise WireError("a message must be JSON, but is not") from None
    if not isinstance(message, dict):
        raise WireError("a message must be a JSON object, but is not")
    return message


def receive_exactly(connection: socket.socket, length: int, deadline: float | None = None) -> bytearray:
    """Receives `length` bytes. Raises WireError if the other side closes before, and TimeoutError at the deadline."""
    data = bytearray(length)
    view, have = memoryview(data), 0
    while have < length:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        count = connection.recv_into(view[have:])
        if not count:
            raise WireError("the other side has closed the connection")
        have += count
    return data


@final
class CallCodec:
    """Calls of programs as bytes.

    Args:
        schema: Name of every program → shapes and types of its arguments from the host; in one order on all hosts.
    """

    def __init__(self, schema: dict[Hashable, Sequence[Any]]):
        self._numbers = {name: number for number, name in enumerate(schema)}
        self._programs = [
            (name, [(each.shape, np.dtype(each.dtype)) for each in shapes]) for name, shapes in schema.items()
        ]

    def send(self, connections: Sequence[socket.socket], name: Hashable, arrays: Sequence[np.ndarray]) -> None:
        """Sends a call to all hosts.

        Raises:
            ValueError: The arrays are not the arguments of the program.
            OSError: A host is gone.
        """
        number = self._numbers[name]
        if [(array.shape, array.dtype) for array in arrays] != self._programs[number][1]:
            raise ValueError(f"{name} takes {self._programs[number][1]}")
        parts = [_NUMBER.pack(number), *(_bytes_of(array) for array in arrays)]
        if sum(map(len, parts)) <= JOIN_BYTES:
            parts = [b"".join(parts)]
        for connection in connections:
            for part in parts:
                connection.sendall(part)

    def send_end(self, connections: Sequence[socket.socket]) -> None:
        """Tells all hosts that there will be no more calls."""
        for connection in connections:
            with contextlib.suppress(OSError):  # the host has ended already
                connection.sendall(_NUMBER.pack(_END))

    def receive(self, connection: socket.socket) -> tuple[Hashable, list[np.ndarray]] | None:
        """Waits for the next call; None after the last.

        The arrays are new, because JAX may read one in place after its call has returned.

        Raises:
            WireError: The leader is gone, or there is no such program.
        """
        (number,) = _NUMBER.unpack(receive_exactly(connection, _NUMBER.size))
        if number == _END:
            return None
        if not 0 <= number < len(self._programs):
            raise WireError(f"a call must name one of {len(self._programs)} programs, but names {number}")
        name, shapes = self._programs[number]
        return name, [_receive_array(connection, shape, dtype) for shape, dtype in shapes]


def _bytes_of(array: np.ndarray) -> memoryview:
    return memoryview(np.ascontiguousarray(array).reshape(-1)).cast("B")


def _receive_array(connection: socket.socket, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    data = receive_exactly(connection, math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)
