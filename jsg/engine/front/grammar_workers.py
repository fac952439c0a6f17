"""The front's grammar processes: it starts them when they are needed, and ends one that fails."""

import asyncio
import contextlib
import logging
import os
import sys
from asyncio.subprocess import PIPE, Process
from typing import final

import msgspec

from jsg.constrained.text_patterns import PatternSet
from jsg.engine.child.grammar_process import HEADER, OUT_OF_TIME, frame, too_costly
from jsg.engine.child.protocol import Failure
from jsg.errors import JsgError, QueueFullError
from jsg.types import GrammarSpec

logger = logging.getLogger(__name__)

COMPILE_S = 5.0  # CPU time that a grammar may take; fuel ends nearly all costly ones far earlier
END_S = 1.0  # a process that closes its pipe has ended by then
STALL_S = 60.0  # a process that needs longer for a grammar, or to start, gets no CPU


@final
class GrammarWorkers:
    """Processes that compile one grammar at a time. It keeps as many as were needed at once; an idle one takes 25 MB.

    Invariant: a process is idle, or taken until `compile` gives it back, or has ended.
    """

    def __init__(self, compile_s: float = COMPILE_S) -> None:
        self._compile_s = compile_s
        self._stall_s = STALL_S
        self._idle: list[Process] = []
        self._taken: set[Process] = set()
        self._is_closed = False

    async def take(self) -> Process:
        """An idle or a new process that is ready; hand it to `compile`.

        Raises:
            JsgError: No process can be started.
        """
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:  # an idle process that has ended is no grammar's fault
                break
        else:
            process = await self._start()
        self._taken.add(process)
        return process

    async def warm(self) -> None:
        """Starts a process, so that the first grammar need not wait for one. Raises JsgError where that fails."""
        if not self._idle and not self._taken:
            self._idle.append(await self._start())

    async def compile(self, process: Process, spec: GrammarSpec | PatternSet) -> bytes | Failure:
        """The tables that a taken process makes of a grammar, or why there are none. The process is idle afterwards.

        Raises:
            GrammarError: The grammar took too much time, or ended the process.
            QueueFullError: The machine is too busy.
            JsgError: The server is ending.
        """
        try:
            async with asyncio.timeout(self._stall_s):
                answer = await _converse(process, spec, self._compile_s)
        except TimeoutError:
            await self._end(process)
            raise QueueFullError(
                f"a grammar must be compiled within {self._stall_s:g} s, but the machine was too busy; try again later"
            ) from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            # Before a signal `Popen` reads the status of a process that has ended, and it would be lost here.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(END_S):
                    await process.wait()
            raise self._blamed(spec, await self._end(process)) from error
        except asyncio.CancelledError:
            await self._end(process)
            raise
        self._taken.discard(process)
        self._idle.append(process)
        return answer

    async def close(self) -> None:
        """Ends all processes. Compilations that are under way fail."""
        self._is_closed = True
        for process in [*self._idle, *self._taken]:
            await self._end(process)
        self._idle.clear()

    def _blamed(self, spec: GrammarSpec | PatternSet, status: int) -> JsgError:
        """The error for a process that ended while it compiled a grammar."""
        if self._is_closed:
            return JsgError("the server is ending")
        if status == -OUT_OF_TIME:
            rule = f"a grammar must compile within {self._compile_s:g} s of CPU time, but this one takes longer"
        else:
            logger.error("the grammar process ended with status %d over a grammar of kind %s", status, spec.kind)
            rule = "compiling the grammar ended the process that did it"
        return too_costly(spec, rule)

    async def _start(self) -> Process:
        """Starts a process like that of the engine: in a group of its own, with the import path of this process."""
        process = None
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "jsg.engine.child.grammar_process", str(os.getpid()),
                stdin=PIPE,
                stdout=PIPE,
                process_group=0,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )  # fmt: skip
            self._taken.add(process)
            if self._is_closed:
                raise EOFError("closed while the process was being started")
            async with asyncio.timeout(self._stall_s):
                await _read(process)  # an empty frame says that it is ready
        except BaseException as error:
            if process is not None:
                await self._end(process)
            if not isinstance(error, OSError | EOFError | TimeoutError):
                raise
            if self._is_closed:
                raise JsgError("the server is ending") from error
            logger.exception("a grammar process could not be started")
            raise JsgError("grammars cannot be compiled now; the server's log has the cause") from error
        self._taken.discard(process)
        return process

    async def _end(self, process: Process) -> int:
        """Kills a process that has not ended by itself; returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        self._taken.discard(process)
        return await process.wait()


async def _converse(process: Process, spec: GrammarSpec | PatternSet, cpu_s: float) -> bytes | Failure:
    assert process.stdin is not None, "it is a pipe"
    process.stdin.write(frame(msgspec.msgpack.encode((spec, cpu_s))))
    await process.stdin.drain()
    return msgspec.msgpack.decode(await _read(process), type=bytes | Failure)


async def _read(process: Process) -> bytes:
    assert process.stdout is not None, "it is a pipe"
    (size,) = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return await process.stdout.readexactly(size)
