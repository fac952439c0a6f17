"""Grammars on their way to the engine: the processes that compile them."""

import asyncio
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable

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
from tests.engine.front.background import idle_pids, note_compilations, until

SLOW = GrammarSpec("json_schema", json.dumps({"enum": [f"{i:x} of many" for i in range(20_000)]}))


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def matches(tables: bytes, text: str) -> bool:
    machine = Machine(StaticTables.from_bytes(tables))
    config = machine.advance(machine.start(), text.encode())
    return config is not None and machine.is_accepting(config)


Processes = list[asyncio.subprocess.Process]


@pytest.fixture(scope="module")
async def processes() -> AsyncIterator[Processes]:
    """Idle ones that earlier tests have left, for the next: each costs most of a second to start."""
    left: Processes = []
    yield left
    workers = GrammarWorkers()
    workers._idle = left
    await workers.close()


@pytest.fixture
async def made(processes: Processes) -> AsyncIterator[Callable[..., GrammarCompiler]]:
    """Makes a compiler that has an idle process already, or, if it `is_bare`, has none."""
    compilers = []

    def make(is_bare: bool = False, **options: float) -> GrammarCompiler:
        compilers.append(GrammarCompiler(**options))
        if processes and not is_bare:
            compilers[0].workers._idle.append(processes.pop())
        return compilers[0]

    yield make
    (compiler,) = compilers
    while len(compiler.workers._idle) > 1 - len(processes):
        await compiler.workers._end(compiler.workers._idle.pop())
    processes.extend(compiler.workers._idle)
    compiler.workers._idle.clear()
    await compiler.close()


async def stopped_process(compiler: GrammarCompiler) -> int:
    """The process that will compile the next grammar; it does nothing until it is killed or continued."""
    await compiler.warm()
    (pid,) = idle_pids(compiler.workers)
    os.kill(pid, signal.SIGSTOP)
    return pid


async def test_a_grammar_is_compiled_once_however_many_ask(made):
    compiler = made()
    compiled = note_compilations(compiler)
    results = await asyncio.gather(*(compiler.tables(spec("a+b")) for _ in range(20)))
    later = await compiler.tables(spec("a+b"))
    assert set(results) == {later} and compiled == ["a+b"]
    assert matches(later, "aab") and not matches(later, "aba")


async def test_a_refusal_is_remembered_and_the_process_goes_on(made):
    compiler = made(blame_s=0.0)
    compiled = note_compilations(compiler)
    for _ in range(2):
        with pytest.raises(GrammarError, match="look"):
            await compiler.tables(spec("(?=a)b"))
    (pid,) = idle_pids(compiler.workers)
    assert matches(await compiler.tables(spec("b")), "b")
    assert compiled == ["(?=a)b", "b"] and idle_pids(compiler.workers) == [pid]


async def test_a_set_of_patterns_is_one_grammar_and_names_the_pattern_that_is_refused(made):
    good, bad = PatternSet("matches", ("a+", "b")), PatternSet("matches", ("a+", "(b"))
    compiler, begun = made(), []
    compile = compiler.workers.compile
    compiler.workers.compile = lambda process, spec: begun.append(spec) or compile(process, spec)
    tables, again = [await compiler.patterns(good) for _ in range(2)]
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"the pattern '\(b' of matches\(\) is refused") as refused:
            await compiler.patterns(bad)
        assert refused.value.param == "(b"
    assert tables == again == pattern_tables(good) and begun == [good, bad]


async def test_patterns_that_take_too_much_time_are_refused_together(made):
    compiler = made()
    pid = await stopped_process(compiler)
    asked = asyncio.ensure_future(compiler.patterns(PatternSet("matches", ("a",))))
    await until(lambda: not idle_pids(compiler.workers))
    os.kill(pid, signal.SIGPROF)  # as its timer does
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(GrammarError, match=r"matches: .* within 5 s of CPU time") as refused:
        await asked
    assert refused.value.param == "matches"


async def test_a_process_that_dies_fails_its_grammar_only_and_for_a_while(made):
    compiler = made()
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
    b, a, cached_bytes = await compiler.tables(spec("b")), await compiler.tables(spec("a")), compiler._cache.num_bytes
    assert matches(b, "b") and matches(a, "a") and cached_bytes == len(a) + len(b)


async def test_a_grammar_that_takes_too_much_time_is_refused_for_a_while_and_the_next_one_compiles(made):
    compiler = made(compile_s=0.2, blame_s=0.0)
    compiled = note_compilations(compiler)
    for _ in range(2):
        with pytest.raises(GrammarError, match=r"json_schema: .* within 0\.2 s of CPU time") as refusal:
            await compiler.tables(SLOW)
        assert refusal.value.param == "json_schema"
    assert len(compiled) == 2, "it was forgotten at once"
    with pytest.raises(GrammarError, match=r"tools is not valid: a grammar must compile within 0\.2 s"):
        await compiler.tables(dataclasses.replace(SLOW, field="tools"))
    assert matches(await compiler.tables(spec("b")), "b")


async def test_the_reason_is_known_though_the_process_is_gone_before_the_loop_looks(
    made, monkeypatch: pytest.MonkeyPatch
):
    read = grammar_workers._read

    async def read_late(process: asyncio.subprocess.Process) -> bytes:
        try:
            return await read(process)
        except EOFError:
            time.sleep(0.2)  # the loop is busy with something else
            raise

    monkeypatch.setattr(grammar_workers, "_read", read_late)

    compiler = made(compile_s=0.05)
    with pytest.raises(GrammarError, match="CPU time"):
        await compiler.tables(SLOW)


async def test_a_process_that_stands_still_refuses_no_grammar(made):
    compiler = made(compile_s=0.25)
    pid = await stopped_process(compiler)
    asked = asyncio.ensure_future(compiler.tables(spec("a")))
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    assert matches(await asked, "a")


async def test_a_machine_that_is_too_busy_is_not_the_fault_of_a_grammar(made):
    compiler = made()
    await stopped_process(compiler)
    compiler.workers._stall_s = 0.05
    with pytest.raises(QueueFullError, match=r"within 0\.05 s, but the machine was too busy"):
        await compiler.tables(spec("a"))
    compiler.workers._stall_s = 60.0
    assert matches(await compiler.tables(spec("a")), "a")


async def test_processes_that_do_not_start_leave_the_room_for_those_that_do(made, monkeypatch: pytest.MonkeyPatch):
    compiler = made(is_bare=True)
    with monkeypatch.context() as broken:
        for executable in ("/does/not/exist", "/bin/false"):
            broken.setattr(sys, "executable", executable)
            for i in range(3):
                with pytest.raises(JsgError, match="cannot be compiled now") as failure:
                    await compiler.tables(spec(f"a{i}"))
                assert not isinstance(failure.value, GrammarError)
    assert matches(await compiler.tables(spec("a1")), "a1")


async def test_old_tables_are_dropped_by_bytes(made):
    one = compile_tables(spec("x0")).to_bytes()
    compiler = made(cache_bytes=5 * len(one))
    for i in range(20):
        await compiler.tables(spec(f"x{i}"))
    cached_bytes, count = compiler._cache.num_bytes, len(compiler._cache._values)
    assert cached_bytes <= 5 * len(one) and 1 <= count <= 5


async def test_closing_ends_every_process(made):
    compiler = made()
    await asyncio.gather(*(compiler.tables(spec(f"y{i}")) for i in range(8)))
    pids = idle_pids(compiler.workers)
    slow = [asyncio.ensure_future(compiler.tables(spec(f"z{i}"))) for i in range(8)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    await until(lambda: not idle_pids(compiler.workers))
    await compiler.close()
    for failure in await asyncio.gather(*slow, return_exceptions=True):
        assert isinstance(failure, JsgError) and "ending" in str(failure)
    assert 1 <= len(pids) <= MOST_AT_ONCE
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_process_that_ends_while_idle_is_no_fault_of_the_next_grammar(made):
    compiler = made()
    await compiler.warm()
    (pid,) = idle_pids(compiler.workers)
    process = compiler.workers._idle[0]
    os.kill(pid, signal.SIGKILL)
    await process.wait()
    assert matches(await compiler.tables(spec("ab")), "ab")
