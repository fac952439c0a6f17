"""The front's side of the grammar processes: a client's grammar becomes tables for the engine. No JAX here."""

import asyncio
import contextlib
import logging
import os
import struct
import sys
from collections import OrderedDict
from typing import final

import msgspec

from jsg.engine.protocol import Failure, GrammarAnswer
from jsg.errors import GrammarError, JsgError, QueueFullError
from jsg.types import GrammarSpec

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<I")  # of a message to or from a process: the length of what follows
PROCESSES = 2  # so that one slow grammar does not hold up the others
COMPILE_S = 5.0  # a grammar may take so long; fuel ends nearly all others far earlier
MAX_WAITING = 1000
CACHE_BYTES = 64 * 2**20
FAILURE_BYTES = 1024  # what a remembered refusal counts


@final
class GrammarCompiler:
    """Compiles grammars in processes of its own, each once, and remembers tables and refusals, least recently used out.

    Everything happens on one event loop.
    """

    def __init__(self, *, processes: int = PROCESSES, compile_s: float = COMPILE_S, cache_bytes: int = CACHE_BYTES):
        self._compile_s = compile_s
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[str, bytes | Failure] = OrderedDict()
        self._cached_bytes = 0
        self._under_way: dict[str, asyncio.Task[bytes | Failure]] = {}
        self._room = asyncio.Semaphore(processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self._busy: set[asyncio.subprocess.Process] = set()
        self._is_closed = False
        self.num_compiled = 0
        self.num_refused = 0
        self.num_found = 0

    async def tables(self, spec: GrammarSpec) -> bytes:
        """The tables of a grammar, as `jsg.constrained.tables` reads them.

        Raises:
            GrammarError: It is wrong, not supported, or takes too long.
            QueueFullError: Too many grammars wait.
        """
        key = spec.key
        known = self._cache.get(key)
        if known is not None:
            self._cache.move_to_end(key)
            self.num_found += 1
        else:
            known = await asyncio.shield(self._task(key, spec))
        if isinstance(known, Failure):
            raise known.to_error()
        return known

    async def warm(self) -> None:
        """Starts a process, so that the first grammar need not wait for one."""
        if not self._idle and not self._busy:
            self._idle.append(await self._spawn())

    async def close(self) -> None:
        """Ends the processes; what is under way fails."""
        self._is_closed = True
        for task in self._under_way.values():
            task.cancel()
        for process in [*self._idle, *self._busy]:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        self._idle.clear()

    def _task(self, key: str, spec: GrammarSpec) -> asyncio.Task[bytes | Failure]:
        """The one compilation of a grammar that is under way, begun where there is none."""
        task = self._under_way.get(key)
        if task is None:
            if len(self._under_way) >= MAX_WAITING:
                raise QueueFullError(f"{MAX_WAITING} grammars wait to be compiled; try again later")
            task = self._under_way[key] = asyncio.create_task(self._compile(key, spec))
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be waiting any more
        return task

    async def _compile(self, key: str, spec: GrammarSpec) -> bytes | Failure:
        try:
            async with self._room:
                result = await self._ask(spec)
        finally:
            del self._under_way[key]
        if isinstance(result, Failure):
            self.num_refused += 1
        else:
            self.num_compiled += 1
        self._remember(key, result)
        return result

    def _remember(self, key: str, result: bytes | Failure) -> None:
        self._cache[key] = result
        self._cached_bytes += _num_bytes(result)
        while self._cached_bytes > self._cache_bytes and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= _num_bytes(oldest)

    async def _ask(self, spec: GrammarSpec) -> bytes | Failure:
        """Hands a grammar to a process. One that takes too long is killed, and the next grammar gets a new one."""
        process = self._idle.pop() if self._idle else await self._spawn()
        self._busy.add(process)
        try:
            async with asyncio.timeout(self._compile_s):
                answer = await _converse(process, spec)
        except TimeoutError:
            await _end(process)
            message = f"{spec.kind}: a grammar must compile within {self._compile_s:g} s, but this one takes longer"
            return Failure.of(GrammarError(f"{message}; simplify it", param=spec.kind))
        except (OSError, EOFError, msgspec.MsgspecError):
            await _end(process)
            if self._is_closed:
                return Failure.of(JsgError("the server is ending"))
            logger.exception("the grammar process ended while it compiled a grammar of kind %s", spec.kind)
            message = f"{spec.kind}: compiling the grammar ended the process that did it; simplify it"
            return Failure.of(GrammarError(message, param=spec.kind))
        except asyncio.CancelledError:
            await _end(process)
            raise
        else:
            self._idle.append(process)
        finally:
            self._busy.discard(process)
        return answer.failure or answer.tables or b""

    async def _spawn(self) -> asyncio.subprocess.Process:
        """Like the engine process: in a group of its own, and with the import path of this one."""
        return await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "jsg.engine.grammar_process", str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip


def frame(payload: bytes) -> bytes:
    """A payload with its length in front."""
    return HEADER.pack(len(payload)) + payload


async def _converse(process: asyncio.subprocess.Process, spec: GrammarSpec) -> GrammarAnswer:
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    process.stdin.write(frame(msgspec.msgpack.encode(spec)))
    await process.stdin.drain()
    (size,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=GrammarAnswer)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()


def _num_bytes(result: bytes | Failure) -> int:
    return FAILURE_BYTES if isinstance(result, Failure) else len(result)
