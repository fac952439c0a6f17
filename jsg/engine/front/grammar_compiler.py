"""The front's side of the grammar processes: a client's grammar becomes tables for the engine."""

import dataclasses
import logging
import time
from asyncio.subprocess import Process
from typing import final

import msgspec

from jsg.byte_cache import ByteCache
from jsg.constrained.text_patterns import PatternSet, PatternTables
from jsg.engine.child.protocol import Failure
from jsg.engine.front.grammar_queue import WAIT_S, GrammarQueue
from jsg.engine.front.grammar_workers import COMPILE_S, GrammarWorkers
from jsg.errors import GrammarError, JsgError
from jsg.types import GrammarSpec

logger = logging.getLogger(__name__)

CACHE_BYTES = 64 * 2**20
FAILURE_BYTES = 1024  # what a remembered refusal counts in the cache
BLAME_S = 30.0
"""How long a grammar that ended its process is refused. The machine may have been the cause, so it is not for ever, but
asking again at once must not cost another five seconds."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Known:
    """The tables of a grammar or its refusal, and when that ceases to hold, in seconds of `time.monotonic`."""

    result: bytes | Failure
    until: float | None

    @property
    def num_bytes(self) -> int:
        return FAILURE_BYTES if isinstance(self.result, Failure) else len(self.result)


@final
class GrammarCompiler:
    """Compiles each grammar once, in processes of its own, and keeps tables and refusals in a bounded cache.

    Everything happens on one event loop.
    """

    def __init__(
        self,
        *,
        compile_s: float = COMPILE_S,
        wait_s: float = WAIT_S,
        cache_bytes: int = CACHE_BYTES,
        blame_s: float = BLAME_S,
    ):
        """Starts no process before a grammar comes.

        Args:
            compile_s: CPU time that a grammar may take.
            wait_s: How long it may wait for a process.
            cache_bytes: The most bytes of tables and refusals that are kept.
            blame_s: How long a grammar is refused that took too long or ended its process.
        """
        self.workers = GrammarWorkers(compile_s)
        self._queue = GrammarQueue(self.workers.take, self._compile, wait_s=wait_s)
        self._blame_s = blame_s
        self._cache = ByteCache[str, _Known](cache_bytes, lambda known: known.num_bytes)
        self._is_closed = False

    async def patterns(self, patterns: PatternSet, owner: str = "") -> PatternTables:
        """The tables of a set of patterns, which take the time and the place of one grammar. Raises as `tables`."""
        return msgspec.msgpack.decode(await self.tables(patterns, owner), type=PatternTables)

    async def tables(self, spec: GrammarSpec | PatternSet, owner: str = "") -> bytes:
        """The tables of a grammar, as `jsg.constrained.tables` reads them, or of patterns, in msgpack.

        Args:
            spec: The grammar, or the patterns.
            owner: The owner whose turn it takes; owners take turns.

        Raises:
            GrammarError: It is wrong, not supported, or takes too long.
            QueueFullError: Too many grammars wait, or it waited too long.
            JsgError: No process could be started, or the server is ending.
        """
        known = self._cache.get(spec.key)
        if known is None or (known.until is not None and time.monotonic() >= known.until):
            known = await self._queue.run(spec, owner)
        if isinstance(known.result, Failure):
            raise known.result.to_error()
        return known.result

    async def check(self, spec: GrammarSpec, owner: str = "") -> None:
        """Compiles a grammar although its tables are known. Raises as `tables` does."""
        known = await self._queue.run(spec, owner)
        if isinstance(known.result, Failure):
            raise known.result.to_error()

    async def warm(self) -> None:
        """Starts a process, so that the first grammar need not wait for it. If that fails, the first grammar tells."""
        try:
            await self.workers.warm()
        except JsgError:
            if not self._is_closed:
                logger.exception("no process for grammars could be started")

    async def close(self) -> None:
        """Ends the processes. Compilations that are under way fail."""
        self._is_closed = True
        self._queue.close()
        await self.workers.close()

    async def _compile(self, process: Process, spec: GrammarSpec | PatternSet) -> _Known:
        until = None
        try:
            result = await self.workers.compile(process, spec)
        except GrammarError as error:
            result, until = Failure.of(error), time.monotonic() + self._blame_s
        known = _Known(result, until)
        self._cache.put(spec.key, known)
        return known
