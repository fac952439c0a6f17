"""A ZeroMQ socket between two processes, on an event loop. It makes few of the calls that `zmq.asyncio` makes.

The descriptor of such a socket tells of each change once, and any call of the socket may use that up. So whoever has
called it looks at its state afterwards.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from typing import cast, final

import zmq

NOW = int(zmq.NOBLOCK)
ARRIVED, WRITABLE = int(zmq.POLLIN), int(zmq.POLLOUT)


@final
class Channel:
    """One end of a connection. Messages are sequences of frames; none is lost while both ends live."""

    def __init__(self, address: str, *, listens: bool) -> None:
        """Listens or connects. Must run on the event loop that will use the channel."""
        self._socket = zmq.Context().socket(zmq.PAIR)
        self._socket.set_hwm(0)  # who sends bounds what is under way
        if listens:
            self._socket.zap_domain = b"jsg"  # then ZeroMQ refuses ZMTP 1, in which any bytes can be a message
            self._socket.bind(address)
        else:
            self._socket.connect(address)
        self._unsent = deque[Sequence[bytes | memoryview]]()
        self._has_news = asyncio.Event()
        self._fd = self._socket.fileno()
        asyncio.get_running_loop().add_reader(self._fd, self._look)

    def send(self, frames: Sequence[bytes | memoryview]) -> None:
        """Queues a message. Its frames must not change any more. Does nothing once the channel is closed."""
        if not self._socket.closed:
            self._unsent.append(frames)
            self._look()

    async def receive(self) -> list[bytes]:
        """The frames of the next message. Lets nothing else run where one has arrived. A cancel loses no message."""
        while True:
            self._has_news.clear()
            with contextlib.suppress(zmq.Again):
                return self._socket.recv_multipart(NOW)
            await self._has_news.wait()

    async def receive_within(self, seconds: float) -> list[bytes]:
        """The next message; empty where none comes in this time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return await self.receive()
        return []

    def close(self, flush_ms: int = 0) -> None:
        """Closes the connection. Queued messages have up to `flush_ms` to be sent."""
        asyncio.get_running_loop().remove_reader(self._fd)
        self._socket.close(linger=flush_ms)
        self._socket.context.term()

    def _look(self) -> None:
        while self._unsent and self._state & WRITABLE:  # else there is no other end yet
            self._socket.send_multipart(self._unsent.popleft(), NOW, copy=False)
        if self._state & ARRIVED:
            self._has_news.set()

    @property
    def _state(self) -> int:
        return cast(int, self._socket.get(zmq.EVENTS))
