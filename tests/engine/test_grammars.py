"""Grammars on their way to the engine: the processes that compile them, and the ledger of what the engine has."""

import asyncio
import os
import signal

import pytest

from jsg.constrained.machine import Machine
from jsg.constrained.tables import StaticTables
from jsg.engine.grammar_ledger import GrammarLedger
from jsg.engine.grammars import GrammarCompiler
from jsg.errors import GrammarError
from jsg.types import GrammarSpec


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def matches(tables: bytes, text: str) -> bool:
    machine = Machine(StaticTables.from_bytes(tables))
    config = machine.advance(machine.start(), text.encode())
    return config is not None and machine.is_accepting(config)


async def with_compiler(use, **options):
    compiler = GrammarCompiler(**options)
    try:
        return await use(compiler)
    finally:
        await compiler.close()


def test_a_grammar_is_compiled_once_however_many_ask():
    async def use(compiler):
        results = await asyncio.gather(*(compiler.tables(spec("a+b")) for _ in range(20)))
        return results, await compiler.tables(spec("a+b")), compiler.num_compiled, compiler.num_found

    results, later, num_compiled, num_found = asyncio.run(with_compiler(use))
    assert set(results) == {later} and (num_compiled, num_found) == (1, 1)
    assert matches(later, "aab") and not matches(later, "aba")


def test_a_refusal_is_remembered_and_the_process_goes_on():
    async def use(compiler):
        for _ in range(2):
            with pytest.raises(GrammarError, match="look"):
                await compiler.tables(spec("(?=a)b"))
        return await compiler.tables(spec("b")), compiler.num_refused

    tables, num_refused = asyncio.run(with_compiler(use))
    assert matches(tables, "b") and num_refused == 1


def test_a_process_that_dies_fails_its_grammar_only():
    async def use(compiler):
        await compiler.warm()
        (process,) = compiler._idle
        os.kill(process.pid, signal.SIGSTOP)  # so that the grammar is still there when it dies
        asked = asyncio.ensure_future(compiler.tables(spec("a")))
        await asyncio.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(GrammarError, match="ended the process"):
            await asked
        return await compiler.tables(spec("b"))

    assert matches(asyncio.run(with_compiler(use)), "b")


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_compiles():
    async def use(compiler):
        await compiler.warm()
        (process,) = compiler._idle
        os.kill(process.pid, signal.SIGSTOP)
        with pytest.raises(GrammarError, match=r"within 0\.3 s"):
            await compiler.tables(spec("a"))
        compiler._compile_s = 30.0  # the new process has its imports before it
        return await compiler.tables(spec("b"))

    assert matches(asyncio.run(with_compiler(use, compile_s=0.3)), "b")


def test_old_tables_are_dropped_by_bytes():
    async def use(compiler):
        for i in range(20):
            await compiler.tables(spec(f"x{i}"))
        return compiler._cached_bytes, len(compiler._cache)

    one = asyncio.run(with_compiler(lambda compiler: compiler.tables(spec("x0"))))
    cached_bytes, count = asyncio.run(with_compiler(use, cache_bytes=5 * len(one)))
    assert cached_bytes <= 5 * len(one) and 1 <= count <= 5


def test_closing_ends_every_process():
    async def use(compiler):
        await asyncio.gather(*(compiler.tables(spec(f"y{i}")) for i in range(8)))
        return [process.pid for process in compiler._idle]

    pids = asyncio.run(with_compiler(use))
    assert 1 <= len(pids) <= 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_ledger_forgets_the_least_recently_used_and_never_the_one_in_use():
    ledger = GrammarLedger(max_bytes=100)
    for key in "abc":
        ledger.add(key, 40)
        forgotten = ledger.use(key)
    assert forgotten == ["a"] and "a" not in ledger
    assert ledger.use("b") == []
    ledger.add("d", 40)
    assert ledger.use("d") == ["c"]
    ledger.add("huge", 1000)
    assert ledger.use("huge") == ["b", "d"] and "huge" in ledger
