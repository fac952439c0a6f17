"""Grammars between the front and a real engine process around a scripted core, which knows what it was sent."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Sequence

import pytest

from jsg.engine.front.client import EngineClient
from jsg.engine.front.sent_grammars import SentGrammars
from jsg.errors import GrammarError, JsgError, ShuttingDownError
from jsg.types import FinishReason, FinishType, GrammarSpec, RequestOutput
from jsg.waits import WaitReason, stat_of
from tests.engine.fake_core import LATE
from tests.engine.front.background import idle_pids, note_compilations, num_live, num_waiting, outputs_of, until
from tests.engine.front.test_client import collect, endless, fake_engine, request, tokens_of

TOKENS = [1, 2, 3, 1, 2]


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


def with_grammar(rid: str, text: str):
    return request(rid, grammar=spec(text))


async def stopped_processes(client: EngineClient) -> list[int]:
    """The processes that compile the next grammars, stopped until they are continued."""
    workers = client.grammars.workers
    await until(lambda: not workers._taken)
    await client.grammars.warm()
    for pid in idle_pids(workers):
        os.kill(pid, signal.SIGSTOP)
    return idle_pids(workers)


async def read_all(stream: AsyncGenerator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def sizes_of_messages(client: EngineClient) -> list[int]:
    """Grows with each message to the engine by its bytes."""
    sizes: list[int] = []
    send = client._channel.send

    def counted(frames: Sequence[bytes | memoryview]) -> None:
        sizes.append(sum(map(len, frames)))
        send(frames)

    client._channel.send = counted
    return sizes


async def test_the_text_of_a_grammar_stays_in_the_front_however_many_answers_there_are(client: EngineClient):
    text = "(" + "|".join(["a"] * 40_000) + ")"
    await client.grammars.tables(spec(text))
    sizes = sizes_of_messages(client)
    results = await asyncio.gather(*(collect(client, with_grammar(str(i), text)) for i in range(64)))
    assert all(tokens_of(outputs) == TOKENS for outputs in results)
    assert sum(sizes) < len(text) + 64 * 1024


async def test_one_grammar_is_sent_once_and_again_when_it_was_forgotten(client: EngineClient):
    one = len(await client.grammars.tables(spec("own0")))
    compiled = note_compilations(client.grammars)
    client._sent_grammars = SentGrammars(3 * one)
    for _ in range(2):
        wanted = [with_grammar(str(i), f"own{i // 2}") for i in range(40)]
        results = await asyncio.gather(*(collect(client, one) for one in wanted))
        assert all(tokens_of(outputs) == TOKENS for outputs in results), "the core refuses grammars it has not"
        assert (await client.stats())["num_grammars"] <= 3
    assert sorted(compiled) == sorted(f"own{i}" for i in range(1, 20))


async def test_of_one_request_few_grammars_stand_in_line(client: EngineClient):
    asked, most, turns = 0, 0, asyncio.Semaphore(2)
    compile = client.grammars.tables

    async def tables(spec: GrammarSpec, owner: str) -> bytes:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        try:
            return await compile(spec, owner)
        finally:
            asked -= 1

    client.grammars.tables = tables  # pyright: ignore[reportAttributeAccessIssue]
    try:
        streams = [outputs_of(client, with_grammar(str(i), f"turn{i}"), grammar_turns=turns) for i in range(6)]
        results = await asyncio.gather(*map(read_all, streams))
    finally:
        client.grammars.tables = compile
    assert all(tokens_of(outputs) == TOKENS for outputs in results)
    assert (most, asked) == (2, 0)


async def test_the_engine_keeps_the_grammar_that_answers_use(client: EngineClient):
    one = len(await client.grammars.tables(spec("a0")))
    client._sent_grammars = SentGrammars(2 * one)
    for rid, text in enumerate(("a0", "a1", "a0", "a2")):
        await collect(client, with_grammar(str(rid), text))
    assert [spec(text).key in client._sent_grammars for text in ("a0", "a1", "a2")] == [True, False, True]


async def test_a_request_with_a_grammar_waits_until_the_engine_has_loaded_what_it_needs_and_holds_up_no_other():
    async with fake_engine(model_path=LATE) as client:
        asked = asyncio.create_task(collect(client, with_grammar("a", "a+")))
        dropped = asyncio.create_task(collect(client, with_grammar("b", "a+")))
        assert tokens_of(await collect(client, request("c"))) == TOKENS
        await client.grammars.tables(spec("a+"))  # they have been compiled since
        assert tokens_of(await collect(client, request("c"))) == TOKENS
        stats = await client.stats()
        assert (stats["num_grammars"], stats["num_waiting"], stats[stat_of(WaitReason.LOADING)]) == (0, 0, 2)
        assert client.abort("b")
        assert (await dropped)[-1].finish == FinishReason(FinishType.ABORT, message="aborted")
        assert not asked.done()
        assert await client.flush_cache()
        found = await asked
        assert tokens_of(found) == TOKENS
        first, *others = (output.waited for output in found)
        assert first is not None and first.keys() == {WaitReason.GRAMMAR, WaitReason.LOADING, WaitReason.ROWS}
        assert not any(others)


async def test_a_wrong_grammar_is_refused_and_leaves_nothing(client: EngineClient):
    with pytest.raises(GrammarError, match="look"):
        await collect(client, with_grammar("a", "(?=a)b"))
    assert num_live(client) == 0 and tokens_of(await collect(client, request("a"))) == TOKENS


@pytest.mark.parametrize("error", [None, ShuttingDownError("the server is ending")])
async def test_who_is_aborted_while_the_grammar_is_compiled_does_not_wait_for_it(
    client: EngineClient, error: JsgError | None
):
    pids, text = await stopped_processes(client), f"c{len(str(error))}"  # which nobody else has asked for
    asked = asyncio.create_task(collect(client, with_grammar("a", text)))
    await until(lambda: num_live(client) == 1)
    assert not asked.done() and client.abort_all(error=error) == 1
    async with asyncio.timeout(60):
        if error is not None:
            with pytest.raises(ShuttingDownError):
                await asked
        else:
            assert (await asked)[-1].finish == FinishReason(FinishType.ABORT, message="aborted")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert tokens_of(await collect(client, with_grammar("a", text))) == TOKENS


async def test_who_goes_while_the_grammar_waits_takes_it_out_of_the_line(client: EngineClient):
    pids = await stopped_processes(client)
    asked = [asyncio.create_task(collect(client, with_grammar(str(i), f"b{i}"))) for i in range(30)]
    queue = client.grammars._queue
    await until(lambda: num_waiting(queue) > 20)
    assert client._streams.waits[WaitReason.GRAMMAR] == 30
    for task in asked:
        task.cancel()
    await asyncio.wait(asked)
    assert num_waiting(queue) == 0 and num_live(client) == 0
    await until(lambda: not any(client._streams.waits.values()))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


async def test_an_engine_that_ends_leaves_nobody_waiting_for_a_grammar():
    async with fake_engine() as client:
        await client.grammars.warm()
        (pid,) = idle_pids(client.grammars.workers)
        os.kill(pid, signal.SIGSTOP)
        asked = asyncio.create_task(collect(client, with_grammar("a", "a+")))
        await until(lambda: num_live(client) == 1)
        client._child.kill()
        with pytest.raises(JsgError, match="engine process ended"):
            await asked


async def test_a_grammar_of_a_request_that_waits_for_a_place_is_not_forgotten():
    async with fake_engine() as client:
        client.take_turns()
        assert client._streams.places is not None
        num_places = client._streams.places._num
        one = len(await client.grammars.tables(spec("a0")))
        client._sent_grammars = SentGrammars(one)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(collect(client, endless(f"r{i}"))) for i in range(num_places)]
            waiting = [tasks.create_task(collect(client, with_grammar(f"g{i}", f"a{i}"))) for i in range(3)]
            await until(lambda: client._streams.places is not None and len(client._streams.places) == 3)
            assert client.abort("r0")
            for outputs in [await task for task in waiting]:
                assert tokens_of(outputs) == TOKENS
            client.abort_all()
        assert len(running) == num_places
        assert client._sent_grammars.add("another", one, set()) == sorted(spec(f"a{i}").key for i in range(3))
