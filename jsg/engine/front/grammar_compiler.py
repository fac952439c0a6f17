"""The front's side of the grammar processes: a client's grammar becomes tables for the engine. No JAX here."""

import logging
import time
from asyncio.subprocess import Process
from collections import OrderedDict
from typing import final

from jsg.engine.child.protocol import Failure
from jsg.engine.front.grammar_queue import WAIT_S, GrammarQueue
from jsg.engine.front.grammar_workers import COMPILE_S, GrammarWorkers
from jsg.errors import GrammarError, JsgError
from jsg.types import GrammarSpec

logger = logging.getLogger(__name__)

CACHE_BYTES = 64 * 2**20
FAILURE_BYTES = 1024  # what a remembered refusal counts
BLAME_S = 30.0
"""How long it is remembered that a grammar ended its process. That may have been the machine's fault and not the
grammar's, but who asks again at once shall not cost another five seconds."""


@final
class GrammarCompiler:
    """Compiles grammars in processes of its own, each once, and remembers tables and refusals, least recently used out.

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
        """Nothing is started until a grammar comes.

        Args:
            compile_s: CPU time that a grammar may take.
            wait_s: How long it may wait for a process.
            cache_bytes: Of tables and refusals that are remembered.
            blame_s: How long it is remembered that a grammar took too long, or ended its process.
        """
        self.workers = GrammarWorkers(compile_s)
        self._queue = GrammarQueue(self.workers.take, self._compile, wait_s=wait_s)
        self._blame_s = blame_s
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[str, tuple[bytes | Failure, float | None]] = OrderedDict()  # what, and until when
        self._cached_bytes = 0
        self._is_closed = False
        self.num_compiled = 0
        self.num_refused = 0
        self.num_found = 0

    async def tables(self, spec: GrammarSpec, owner: str = "") -> bytes:
        """The tables of a grammar, as `jsg.constrained.tables` reads them.

        Args:
            spec: The grammar.
            owner: Whose turn it takes; owners are served in turn.

        Raises:
            GrammarError: It is wrong, not supported, or takes too long.
            QueueFullError: Too many grammars wait, or it waited too long.
            JsgError: No process could be started, or the server is ending.
        """
        known = self._find(spec.key)
        if known is None:
            known = await self._queue.run(spec, owner)
        else:
            self.num_found += 1
        if isinstance(known, Failure):
            raise known.to_error()
        return known

    async def warm(self) -> None:
        """Starts a process, so that the first grammar need not wait for one. Where that fails the first one says so."""
        try:
            await self.workers.warm()
        except JsgError:
            if not self._is_closed:
                logger.exception("no process for grammars could be started")

    async def close(self) -> None:
        """Ends the processes; what is under way fails."""
        self._is_closed = True
        self._queue.close()
        await self.workers.close()

    async def _compile(self, process: Process, spec: GrammarSpec) -> bytes | Failure:
        until = None
        try:
            answer = await self.workers.compile(process, spec)
            result = answer.failure or answer.tables or b""
        except GrammarError as error:
            result, until = Failure.of(error), time.monotonic() + self._blame_s
        if isinstance(result, Failure):
            self.num_refused += 1
        else:
            self.num_compiled += 1
        self._remember(spec.key, result, until)
        return result

    def _find(self, key: str) -> bytes | Failure | None:
        known, until = self._cache.get(key, (None, None))
        if known is None:
            return None
        if until is not None and time.monotonic() >= until:
            self._forget(key)
            return None
        self._cache.move_to_end(key)
        return known

    def _remember(self, key: str, result: bytes | Failure, until: float | None) -> None:
        if key in self._cache:
            self._forget(key)
        self._cache[key] = result, until
        self._cached_bytes += _num_bytes(result)
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            self._forget(next(iter(self._cache)))

    def _forget(self, key: str) -> None:
        self._cached_bytes -= _num_bytes(self._cache.pop(key)[0])


def _num_bytes(result: bytes | Failure) -> int:
    return FAILURE_BYTES if isinstance(result, Failure) else len(result)
