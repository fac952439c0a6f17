"""The deployment that clients reach: leases a replica for each request and relays bytes."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from typing import Any, final

from starlette.requests import Request
from starlette.responses import Response

from jsg.ray.directory import Report, Ticket
from jsg.ray.options import Options
from jsg.ray.prompt import MAX_UNIT_BYTES, read_prompt
from jsg.ray.relay import NoReplicaError, Relay
from jsg.ray.request_router import DirectoryHandle

REPORT_EVERY_S = 0.02
MAX_REPORT_PAUSE_S = 2.0  # well below directory.MAX_SILENCE_S


@final
class _Lease:
    def __init__(self, front: "Front", key: str, url: str, replica: str) -> None:
        self.url = url
        self.replica = replica
        self._front = front
        self._key = key

    def begin(self) -> None:
        self._front.reports.append(Report(self._key, "begin"))


@final
class Front:
    """One of the processes that relay. Several share the directory.

    Attributes:
        reports: What the directory has not been told yet.
    """

    def __init__(self, options: Options, replicas: Any) -> None:
        """Takes the handle of the replicas' deployment."""
        self.reports: list[Report] = []
        self._name = uuid.uuid4().hex
        self._replicas = replicas.options(stream=True)
        self._options = options
        self._unit_bytes = MAX_UNIT_BYTES  # until the first lease tells better
        self._relay: Relay | None = None

    async def __call__(self, request: Request) -> Response:
        """Answers any request, whatever its path, with what a replica answers."""
        if self._relay is None:  # the constructor runs on another loop
            self._relay = Relay(self._acquire, self._options.wait_s)
            self._reporting = asyncio.create_task(self._report())
        return await self._relay.answer(request)

    @contextlib.asynccontextmanager
    async def _acquire(self, content: bytes, avoid: frozenset[str]) -> AsyncGenerator[_Lease]:
        """One call to a replica, which stays open until the answer has ended: so Serve counts it and drains it."""
        key, prompt = uuid.uuid4().hex, read_prompt(content, self._unit_bytes)
        call = self._replicas.lease.remote(ticket=Ticket(self._name, key, prompt, avoid))
        try:
            try:
                url, replica, pool = await anext(aiter(call))
            except Exception as error:  # Ray's errors of actors that end have no common base
                raise NoReplicaError(getattr(error, "replica", None)) from error
            self._unit_bytes = pool.unit_bytes
            self.reports.append(Report(key, "lease", replica, pool))
            yield _Lease(self, key, url, replica)
        finally:
            call.cancel()
            self.reports.append(Report(key, "end"))

    async def _report(self) -> None:
        """Tells the directory in one call what has happened since the last one."""
        directory, pause_s = DirectoryHandle(), 0.0
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            pause_s += REPORT_EVERY_S
            if not self.reports and pause_s < MAX_REPORT_PAUSE_S:
                continue
            told, self.reports, pause_s = self.reports, [], 0.0
            if (actor := directory.get()) is None:
                continue  # a new one knows nothing of these requests
            try:
                await actor.note.remote(self._name, told)
            except Exception:  # the actor has ended
                directory.lose()
