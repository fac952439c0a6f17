"""Clients of engine processes, and what tests look at in them and in the processes that compile grammars."""

import asyncio
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Callable
from typing import Any

from jsg.config import EngineConfig
from jsg.engine.child.protocol import Failure
from jsg.engine.front.children import EngineChild
from jsg.engine.front.client import EngineClient
from jsg.engine.front.fleet import EngineFleet
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.engine.front.grammar_queue import GrammarQueue
from jsg.engine.front.grammar_workers import GrammarWorkers
from jsg.types import GrammarSpec, Request, RequestOutput

RUN_S = 120.0
"""No test takes so long, however busy the machine is."""


async def start_client(config: EngineConfig, *, core: str) -> EngineClient:
    """Starts an engine process and waits until it is ready. Raises what its start raised, or EngineDeadError."""
    client = EngineClient(EngineChild.spawn(config, core=core), config)
    try:
        await client.ready()
    except BaseException:
        await client.close()
        raise
    return client


def num_live(client: EngineClient | EngineFleet, owner: str | None = None) -> int:
    """Requests of an owner, or of everybody, that have begun and not ended."""
    return sum(len(engine._streams.all_of(owner)) for engine in client.engines)


def idle_pids(workers: GrammarWorkers) -> list[int]:
    """Process ids of the grammar processes that are idle."""
    return [process.pid for process in workers._idle]


def note_compilations(compiler: GrammarCompiler) -> list[str]:
    """The texts of grammars whose compilation ends from now on."""
    texts: list[str] = []
    compile = compiler.workers.compile

    async def noted(process: Process, spec: GrammarSpec) -> bytes | Failure:
        try:
            return await compile(process, spec)
        finally:
            texts.append(spec.text)

    compiler.workers.compile = noted
    return texts


def num_waiting(queue: GrammarQueue) -> int:
    """Grammars that have not begun."""
    return len(queue._jobs) - queue._begun.total()


async def until(condition: Callable[[], bool]) -> None:
    """Waits until something has come about that is sure to."""
    async with asyncio.timeout(RUN_S):
        while not condition():
            await asyncio.sleep(0.01)


async def outputs_of(
    client: EngineClient | EngineFleet, request: Request, owner: str = "", **options: Any
) -> AsyncGenerator[RequestOutput]:
    """The outputs of a request, up to the last one. Raises the error that ends it. To close it ends the request."""
    arrived = asyncio.Queue[RequestOutput | Exception]()
    end = client.begin(request, owner, arrived.put_nowait, **options)
    try:
        output = None
        while output is None or output.finish is None:
            if isinstance(output := await arrived.get(), Exception):
                raise output
            yield output
    finally:
        end()
