"""A server that plays a script over a real socket, and a clock that both sides share, so that delays are counts."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any


class SharedClock:
    """Seconds that pass only when the script says so. Counts how often it was read."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_reads = 0

    def __call__(self) -> float:
        self.num_reads += 1
        return self.now

    async def wait_for_read(self, before: int) -> None:
        """Waits until the client has looked at the clock again, which it does for each chunk that it reads."""
        deadline = asyncio.get_running_loop().time() + 10
        while self.num_reads == before:
            assert asyncio.get_running_loop().time() < deadline, "the client does not read"
            await asyncio.sleep(0)


class Cut(Exception):
    """In a script: the connection is reset here."""


Script = Sequence[bytes | float | type[Cut]]


class ScriptedServer:
    """Plays one script for each request. Bytes are one chunk; a number is the seconds before the next chunk."""

    def __init__(self, scripts: dict[str, Script], clock: SharedClock, status: int = 200) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._scripts = scripts
        self._clock = clock
        self._status = status

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line)
            self.bodies.append(json.loads(await reader.readexactly(length)))
            writer.write(
                f"HTTP/1.1 {self._status} X\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
            )
            for part in self._scripts[head.split()[1]]:
                if isinstance(part, float):
                    self._clock.now += part
                elif isinstance(part, bytes):
                    num_reads = self._clock.num_reads
                    writer.write(b"%x\r\n%s\r\n" % (len(part), part))
                    await writer.drain()
                    if self._status == 200 and self.bodies[-1].get("stream"):
                        await self._clock.wait_for_read(num_reads)
                else:
                    writer.transport.abort()
                    return
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def scripted_server(
    scripts: dict[str, Script], clock: SharedClock, status: int = 200
) -> AsyncIterator[tuple[str, ScriptedServer]]:
    """Its base URL and itself."""
    script = ScriptedServer(scripts, clock, status)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    try:
        host, port = server.sockets[0].getsockname()
        yield f"http://{host}:{port}", script
    finally:
        server.close()
        await server.wait_closed()
