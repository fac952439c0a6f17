"""Grammars on their way to the engine: the processes that compile them."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from jsg.constrained.compiler import compile_tables
from jsg.constrained.run.machine import Machine
from jsg.constrained.tables import StaticTables
from jsg.constrained.text_patterns import PatternSet, pattern_tables
from jsg.engine.front import grammar_workers
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.engine.front.grammar_queue import MOST_AT_ONCE
from jsg.engine.front.grammar_workers import GrammarWorkers
from jsg.errors import GrammarError, JsgError, QueueFullError
from jsg.types import GrammarSpec
from tests.engine.front.background import BackgroundLoop, idle_pids, note_compilations, until

SLOW = GrammarSpec("json_schema", json.dumps({"enum": [f"{i:x} of many" for i in range(20_000)]}))


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def matches(tables: bytes, text: str) -> bool:
    machine = Machine(StaticTables.from_bytes(tables))
    config = machine.advance(machine.start(), text.encode())
    return config is not None and machine.is_accepting(config)


Processes = list[asyncio.subprocess.Process]


@pytest.fixture(scope="module")
def processes(loop: BackgroundLoop) -> Iterator[Processes]:
    """Idle ones that earlier tests have left, for the next: each costs most of a second to start."""
    left: Processes = []
    yield left
    workers = GrammarWorkers()
    workers._idle = left
    loop.run(workers.close())


@pytest.fixture
def run(loop: BackgroundLoop, processes: Processes) -> Callable[..., Any]:
    """Gives what a coroutine gives for a compiler that has an idle process already, or, if it `is_bare`, has none."""

    async def main(use: Callable[[GrammarCompiler], Awaitable[Any]], is_bare: bool, **options: float) -> Any:
        compiler = GrammarCompiler(**options)
        if processes and not is_bare:
            compiler.workers._idle.append(processes.pop())
        try:
            return await use(compiler)
        finally:
            while len(compiler.workers._idle) > 1 - len(processes):
                await compiler.workers._end(compiler.workers._idle.pop())
            processes.extend(compiler.workers._idle)
            compiler.workers._idle.clear()
            await compiler.close()

    return lambda use, is_bare=False, **options: loop.run(main(use, is_bare, **options))


async def stopped_process(compiler: GrammarCompiler) -> int:
    """The process that will compile the next grammar; it does nothing until it is killed or continued."""
    await compiler.warm()
    (pid,) = idle_pids(compiler.workers)
    os.kill(pid, signal.SIGSTOP)
    return pid


def test_a_grammar_is_compiled_once_however_many_ask(run):
    async def use(compiler):
        compiled = note_compilations(compiler)
        results = await asyncio.gather(*(compiler.tables(spec("a+b")) for _ in range(20)))
        return results, await compiler.tables(spec("a+b")), compiled

    results, later, compiled = run(use)
    assert set(results) == {later} and compiled == ["a+b"]
    assert matches(later, "aab") and not matches(later, "aba")


def test_a_refusal_is_remembered_and_the_process_goes_on(run):
    async def use(compiler):
        compiled = note_compilations(compiler)
        for _ in range(2):
            with pytest.raises(GrammarError, match="look"):
                await compiler.tables(spec("(?=a)b"))
        (pid,) = idle_pids(compiler.workers)
        return await compiler.tables(spec("b")), compiled, idle_pids(compiler.workers) == [pid]

    tables, compiled, is_same = run(use, blame_s=0.0)
    assert matches(tables, "b") and compiled == ["(?=a)b", "b"] and is_same


def test_a_set_of_patterns_is_one_grammar_and_names_the_pattern_that_is_refused(run):
    good, bad = PatternSet("matches", ("a+", "b")), PatternSet("matches", ("a+", "(b"))

    async def use(compiler):
        begun = []
        compile = compiler.workers.compile
        compiler.workers.compile = lambda process, spec: begun.append(spec) or compile(process, spec)
        tables = [await compiler.patterns(good) for _ in range(2)]
        for _ in range(2):
            with pytest.raises(GrammarError, match=r"the pattern '\(b' of matches\(\) is refused") as refused:
                await compiler.patterns(bad)
            assert refused.value.param == "(b"
        return tables, begun

    (tables, again), begun = run(use)
    assert tables == again == pattern_tables(good) and begun == [good, bad]


def test_patterns_that_take_too_much_time_are_refused_together(run):
    async def use(compiler):
        pid = await stopped_process(compiler)
        asked = asyncio.ensure_future(compiler.patterns(PatternSet("matches", ("a",))))
        await until(lambda: not idle_pids(compiler.workers))
        os.kill(pid, signal.SIGPROF)  # as its timer does
        os.kill(pid, signal.SIGCONT)
        with pytest.raises(GrammarError, match=r"matches: .* within 5 s of CPU time") as refused:
            await asked
        assert refused.value.param == "matches"

    run(use)


def test_a_process_that_dies_fails_its_grammar_only_and_for_a_while(run):
    async def use(compiler):
        compiled = note_compilations(compiler)
        pid = await stopped_process(compiler)  # so that the grammar is still there when it dies
        asked = asyncio.ensure_future(compiler.tables(spec("a")))
        await until(lambda: not idle_pids(compiler.workers))
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(GrammarError, match="ended the process"):
            await asked
        with pytest.raises(GrammarError, match="ended the process"):
            await compiler.tables(spec("a"))
        assert compiled == ["a"]
        known = compiler._cache.get(spec("a").key)
        compiler._cache.put(spec("a").key, dataclasses.replace(known, until=0.0))  # long ago
        return await compiler.tables(spec("b")), await compiler.tables(spec("a")), compiler._cache.num_bytes

    b, a, cached_bytes = run(use)
    assert matches(b, "b") and matches(a, "a") and cached_bytes == len(a) + len(b)


def test_a_grammar_that_takes_too_much_time_is_refused_for_a_while_and_the_next_one_compiles(run):
    async def use(compiler):
        compiled = note_compilations(compiler)
        for _ in range(2):
            with pytest.raises(GrammarError, match=r"json_schema: .* within 0\.2 s of CPU time") as refusal:
                await compiler.tables(SLOW)
            assert refusal.value.param == "json_schema"
        assert len(compiled) == 2, "it was forgotten at once"
        return await compiler.tables(spec("b"))

    assert matches(run(use, compile_s=0.2, blame_s=0.0), "b")


def test_the_reason_is_known_though_the_process_is_gone_before_the_loop_looks(run, monkeypatch: pytest.MonkeyPatch):
    read = grammar_workers._read

    async def read_late(process: asyncio.subprocess.Process) -> bytes:
        try:
            return await read(process)
        except EOFError:
            time.sleep(0.2)  # the loop is busy with something else
            raise

    monkeypatch.setattr(grammar_workers, "_read", read_late)

    async def use(compiler):
        with pytest.raises(GrammarError, match="CPU time"):
            await compiler.tables(SLOW)

    run(use, compile_s=0.05)


def test_a_process_that_stands_still_refuses_no_grammar(run):
    async def use(compiler):
        pid = await stopped_process(compiler)
        asked = asyncio.ensure_future(compiler.tables(spec("a")))
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGCONT)
        return await asked

    assert matches(run(use, compile_s=0.25), "a")


def test_a_machine_that_is_too_busy_is_not_the_fault_of_a_grammar(run):
    async def use(compiler):
        await stopped_process(compiler)
        compiler.workers._stall_s = 0.05
        with pytest.raises(QueueFullError, match=r"within 0\.05 s, but the machine was too busy"):
            await compiler.tables(spec("a"))
        compiler.workers._stall_s = 60.0
        return await compiler.tables(spec("a"))

    assert matches(run(use), "a")


def test_processes_that_do_not_start_leave_the_room_for_those_that_do(run, monkeypatch: pytest.MonkeyPatch):
    async def use(compiler):
        with monkeypatch.context() as broken:
            for executable in ("/does/not/exist", "/bin/false"):
                broken.setattr(sys, "executable", executable)
                for i in range(3):
                    with pytest.raises(JsgError, match="cannot be compiled now") as failure:
                        await compiler.tables(spec(f"a{i}"))
                    assert not isinstance(failure.value, GrammarError)
        return await compiler.tables(spec("a1"))

    assert matches(run(use, is_bare=True), "a1")


def test_old_tables_are_dropped_by_bytes(run):
    async def use(compiler):
        for i in range(20):
            await compiler.tables(spec(f"x{i}"))
        return compiler._cache.num_bytes, len(compiler._cache._values)

    one = compile_tables(spec("x0")).to_bytes()
    cached_bytes, count = run(use, cache_bytes=5 * len(one))
    assert cached_bytes <= 5 * len(one) and 1 <= count <= 5


def test_closing_ends_every_process(run):
    async def use(compiler):
        await asyncio.gather(*(compiler.tables(spec(f"y{i}")) for i in range(8)))
        pids = idle_pids(compiler.workers)
        slow = [asyncio.ensure_future(compiler.tables(spec(f"z{i}"))) for i in range(8)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        await until(lambda: not idle_pids(compiler.workers))
        await compiler.close()
        for failure in await asyncio.gather(*slow, return_exceptions=True):
            assert isinstance(failure, JsgError) and "ending" in str(failure)
        return pids

    pids = run(use)
    assert 1 <= len(pids) <= MOST_AT_ONCE
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_process_that_ends_while_idle_is_no_fault_of_the_next_grammar(run):
    async def use(compiler):
        await compiler.warm()
        (pid,) = idle_pids(compiler.workers)
        process = compiler.workers._idle[0]
        os.kill(pid, signal.SIGKILL)
        await process.wait()
        return await compiler.tables(spec("ab"))

    assert matches(run(use), "ab")
