"""The deployment that clients reach: asks the directory for a replica, once for each request, and relays bytes."""

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any, final

from starlette.requests import Request
from starlette.responses import Response

from jsg.ray.directory import Known, Report, by_hash
from jsg.ray.options import Options
from jsg.ray.prompt import MAX_UNIT_BYTES, PromptUnits, read_prompt
from jsg.ray.relay import Lease, NoReplicaError, Relay

MAX_WAIT_S = 0.05
REPORT_EVERY_S = 0.02
MAX_REPORT_PAUSE_S = 2.0  # well below directory.MAX_SILENCE_S


@final
class Front:
    """One of the processes that relay. Several share the directory."""

    async def __init__(self, options: Options, directory: Any, _replicas: Any) -> None:
        """Takes the handle of the directory. That of the replicas only makes them a part of the application."""
        self._name = uuid.uuid4().hex
        self._directory = directory
        self._known = Known({}, None)
        self._reports: list[Report] = []
        self._relay = Relay(self._acquire, options.wait_s)
        self._reporting = asyncio.create_task(self._report())

    async def __call__(self, request: Request) -> Response:
        """Answers any request, whatever its path, with what a replica answers."""
        return await self._relay.answer(request)

    @contextlib.asynccontextmanager
    async def _acquire(self, content: bytes, avoid: frozenset[str]) -> AsyncGenerator[Lease]:
        key, pool = uuid.uuid4().hex, self._known.pool
        prompt = read_prompt(content, MAX_UNIT_BYTES if pool is None else pool.unit_bytes)
        lease = Lease(begin=lambda: self._reports.append(Report(key, "begin")))
        try:
            lease.replica, lease.url = await self._choose(key, prompt, avoid)
            yield lease
        finally:
            self._reports.append(Report(key, "end", lease.num_tokens))

    async def _choose(self, key: str, prompt: PromptUnits, avoid: frozenset[str]) -> tuple[str, str]:
        """Takes the directory's choice, or else the one of the conversation's hash."""
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                chosen = await self._directory.route.remote(self._name, key, prompt, avoid)
        except Exception:  # it is late, or has ended: no request depends on it
            urls = self._known.urls
            able = [name for name in urls if name not in avoid] or [*urls]
            replica = by_hash(prompt.conversation or key.encode(), able) if able else ""
            chosen = (replica, urls[replica]) if able else None
        if chosen is None:
            raise NoReplicaError
        return chosen

    async def _report(self) -> None:
        """Tells the directory in one call what has happened since the last one, and learns which replicas live."""
        told_at = 0.0
        while True:
            if self._reports or time.monotonic() - told_at > MAX_REPORT_PAUSE_S:
                told, self._reports = self._reports, []
                try:
                    async with asyncio.timeout(MAX_REPORT_PAUSE_S):
                        self._known = await self._directory.note.remote(self._name, told)
                except Exception:  # whatever befell it
                    self._reports[:0] = told
                else:
                    told_at = time.monotonic()
            await asyncio.sleep(REPORT_EVERY_S)
