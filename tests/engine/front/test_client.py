"""The process boundary, with a real child process around a scripted core."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from jsg.config import EngineConfig
from jsg.engine.child.intake import UNITS
from jsg.engine.child.protocol import FromEngine, Progress, ToEngine
from jsg.engine.front.children import EngineChild
from jsg.engine.front.client import MAX_MESSAGES, EngineClient
from jsg.errors import (
    ContextLengthError,
    EngineDeadError,
    JsgError,
    MemoryPlanError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    ShuttingDownError,
)
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams
from tests.engine.fake_core import (
    CRASHING,
    CRASHING_TOKEN,
    ENDLESS_TOKEN,
    FAILING_TOKEN,
    RAISING_TOKEN,
    TOO_LARGE,
    UNCOUNTED,
)
from tests.engine.front.background import num_live, outputs_of, start_client
from tests.engine.front.conftest import FAKE_CORE

DEADLINE_S = 60  # on a busy machine too


@contextlib.asynccontextmanager
async def fake_engine(**knobs) -> AsyncIterator[EngineClient]:
    async with asyncio.timeout(DEADLINE_S):
        client = await start_client(EngineConfig(**knobs), core=FAKE_CORE)
        try:
            yield client
        finally:
            await client.close()


def request(rid: str, ids=(1, 2, 3), **sampling) -> Request:
    return Request(rid=rid, input_ids=tuple(ids), sampling=SamplingParams(**{"max_new_tokens": 5, **sampling}))


def endless(rid: str, token: int = 9) -> Request:
    """Answers until it is aborted, which is no matter of how long a test takes."""
    return request(rid, ids=(ENDLESS_TOKEN, token))


async def collect(client: EngineClient, wanted: Request) -> list[RequestOutput]:
    return [output async for output in outputs_of(client, wanted)]


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


async def test_outputs_arrive_in_order_under_the_clients_name(client: EngineClient):
    outputs = await collect(client, request("mine", stop=("never sent down",)))
    assert tokens_of(outputs) == [1, 2, 3, 1, 2]
    assert {output.rid for output in outputs} == {"mine"}
    assert [output.finish for output in outputs[:-1]] == [None] * 4
    assert outputs[-1].finish == FinishReason(FinishType.LENGTH)


async def test_many_streams_at_once_keep_their_own_tokens(client: EngineClient):
    wanted = [request(f"r{i}", ids=(i, i + 1, i + 2), max_new_tokens=20) for i in range(64)]
    results = await asyncio.gather(*(collect(client, one) for one in wanted))
    for i, outputs in enumerate(results):
        assert tokens_of(outputs) == [i + k % 3 for k in range(20)]


async def test_progress_is_reported_before_ready():
    seen: list[Progress] = []
    config = EngineConfig()
    client = EngineClient(EngineChild.spawn(config, core=FAKE_CORE), config, seen.append)
    try:
        info = await client.ready()
    finally:
        await client.close()
    assert seen == [Progress("plan", 1, 1, "weights 1 MB, KV pool 2 MB"), Progress("load", 1, 1)]
    assert info == client.info and info.eos_token_ids == (257,)


@pytest.mark.parametrize(
    ("ids", "max_new_tokens", "error", "param"),
    [((4000,), 5, RequestError, "input_ids"), ((1,) * 10, 1024, ContextLengthError, "max_new_tokens")],
)
async def test_a_refusal_keeps_its_class_and_param(client: EngineClient, ids, max_new_tokens, error, param):
    with pytest.raises(error) as caught:
        await collect(client, request("a", ids=ids, max_new_tokens=max_new_tokens))
    assert type(caught.value) is error and caught.value.param == param
    assert tokens_of(await collect(client, request("a"))) == [1, 2, 3, 1, 2]


async def test_a_live_rid_is_refused_and_free_again_afterwards(client: EngineClient):
    first = outputs_of(client, endless("same"))
    await anext(first)
    with pytest.raises(RequestError, match="unique"):
        await collect(client, request("same"))
    assert (await anext(first)).finish is None
    await first.aclose()
    assert len(tokens_of(await collect(client, request("same")))) == 5


async def test_closing_a_stream_aborts_it_and_frees_its_name_at_once(client: EngineClient):
    before = (await client.stats())["num_aborted"]
    stream = outputs_of(client, endless("r"))
    await anext(stream)
    time.sleep(0.05)  # there are outputs that nobody has read
    await stream.aclose()
    assert tokens_of(await collect(client, request("r", ids=(5,)))) == [5] * 5
    stats = await client.stats()
    assert (stats["num_aborted"] - before, stats["num_running"]) == (1, 0)


async def test_a_request_closed_before_it_was_sent_never_reaches_the_engine(client: EngineClient):
    before = await client.stats()
    stream = outputs_of(client, endless("r"))
    reading = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)  # one turn: the request is in the outbox, which is sent at the next
    reading.cancel()
    await asyncio.wait({reading})
    stats = await client.stats()
    assert stats["num_running"] == 0
    assert stats["num_added"] - before["num_added"] == stats["num_aborted"] - before["num_aborted"]


async def test_abort_by_name_ends_the_stream_with_a_reason(client: EngineClient):
    stream = outputs_of(client, endless("r"))
    await anext(stream)
    assert client.abort("r") and not client.abort("r")
    rest = [output async for output in stream]
    assert rest[-1].finish is not None and rest[-1].finish.type is FinishType.ABORT
    assert (await client.stats())["num_running"] == 0


async def test_owners_see_nothing_of_each_other(client: EngineClient):
    streams = [outputs_of(client, endless("same", i), f"owner {i}") for i in (1, 2)]
    for stream in streams:
        await anext(stream)
    assert [num_live(client, owner) for owner in ("owner 1", "owner 2", "", None)] == [1, 1, 0, 2]
    assert not client.abort("same") and not client.abort("same", "owner 3")
    with pytest.raises(RequestError, match="unique"):
        await anext(outputs_of(client, request("same"), "owner 2"))
    assert client.abort("same", "owner 1")
    assert [output async for output in streams[0]][-1].finish is not None
    assert (await anext(streams[1])).finish is None
    assert [num_live(client, owner) for owner in ("owner 1", "owner 2", None)] == [0, 1, 1]
    await streams[1].aclose()
    assert num_live(client) == 0


@pytest.mark.parametrize(("owner", "num_ended"), [("a", 2), (None, 3), ("nobody", 0)])
async def test_aborting_all_of_an_owner_leaves_the_others(client: EngineClient, owner: str | None, num_ended: int):
    streams = {name: outputs_of(client, endless(name), name[0]) for name in ("a1", "a2", "b1")}
    for stream in streams.values():
        await anext(stream)
    assert client.abort_all(owner) == num_ended
    assert num_live(client) == 3 - num_ended
    for name, stream in streams.items():
        if owner in (None, name[0]):
            last = [output async for output in stream][-1]
            assert last.finish == FinishReason(FinishType.ABORT, message="aborted")
        else:
            assert (await anext(stream)).finish is None
            await stream.aclose()
    assert (await client.stats())["num_running"] == 0


async def test_aborting_with_an_error_ends_each_stream_with_one_of_its_own(client: EngineClient):
    streams = [asyncio.create_task(collect(client, endless(f"r{i}"))) for i in range(3)]
    await client.stats()
    assert client.abort_all(error=ShuttingDownError("the server is ending")) == 3
    errors = await asyncio.gather(*streams, return_exceptions=True)
    assert [(type(error), str(error)) for error in errors] == [(ShuttingDownError, "the server is ending")] * 3
    assert len(set(map(id, errors))) == 3
    assert (await client.stats())["num_running"] == 0


async def test_text_that_cannot_be_sent_is_refused_and_loses_nobody_elses_message(client: EngineClient):
    odd = dataclasses.replace(request("odd"), namespace="\ud800")
    good, bad = await asyncio.gather(collect(client, request("good")), collect(client, odd), return_exceptions=True)
    assert isinstance(bad, RequestError) and bad.param == "namespace"
    assert isinstance(good, list)
    assert tokens_of(good) == [1, 2, 3, 1, 2]
    surrogate_rid = await collect(client, request("\udfff"))
    assert surrogate_rid[-1].rid == "\udfff"


async def test_a_failing_row_fails_alone(client: EngineClient):
    good = asyncio.create_task(collect(client, request("good", max_new_tokens=30)))
    bad = await collect(client, request("bad", ids=(FAILING_TOKEN,)))
    assert bad[-1].finish == FinishReason(FinishType.ERROR, message="this row failed")
    assert len(tokens_of(await good)) == 30


async def test_a_request_that_raises_fails_alone(capfd):
    async with fake_engine() as client:
        good = asyncio.create_task(collect(client, request("good", max_new_tokens=30)))
        with pytest.raises(JsgError, match="could not take this request") as caught:
            await collect(client, request("bad", ids=(RAISING_TOKEN,)))
        assert type(caught.value) is JsgError
        assert len(tokens_of(await good)) == 30
    assert "this request cannot be added" in capfd.readouterr().err


async def test_a_request_that_waits_too_long_is_refused_while_others_run():
    async with fake_engine(queue_timeout=0.2, max_running_requests=1) as client:
        running = outputs_of(client, endless("runs"))
        await anext(running)
        with pytest.raises(QueueTimeoutError):
            await collect(client, request("waits"))
        assert (await anext(running)).finish is None
        await running.aclose()
        stats = await client.stats()
        assert (stats["num_expired"], stats["num_waiting"]) == (1, 0)


async def test_the_cache_can_be_looked_at(client: EngineClient):
    await collect(client, dataclasses.replace(request("r"), namespace="secret"))
    news = await client.watch_cache(0)
    assert [node[1:4] for node in news["nodes"]] == [["secret", 3, 0]]
    assert news["pool"]["total"] == sum(news["pool"][term] for term in news["pool"]["terms"])


async def test_the_queue_is_bounded_in_the_engine_and_in_the_front():
    async with fake_engine(max_queued_requests=3) as client:
        allowed = 3 + client.info.max_running_requests
        wanted = [request(f"r{i}") for i in range(allowed + 9)]
        results = await asyncio.gather(*(collect(client, one) for one in wanted), return_exceptions=True)
        refusals = [str(result) for result in results if isinstance(result, QueueFullError)]
        assert sum("run and wait" in text for text in refusals) == 9
        num_taken = 3 * -(-allowed // UNITS)  # between two turns those that wait begin to run
        assert sum("may wait" in text for text in refusals) == allowed - num_taken
        assert len(refusals) == len(results) - num_taken


async def test_a_call_that_the_engine_cannot_answer_fails_alone(capfd):
    async with fake_engine(model_path=UNCOUNTED) as client:
        good = asyncio.create_task(collect(client, request("good", max_new_tokens=30)))
        for _ in range(2):
            with pytest.raises(JsgError, match="counters") as caught:
                await client.stats()
            assert type(caught.value) is JsgError
        assert len(tokens_of(await good)) == 30
        assert client.is_alive
    assert "the page equation does not hold" in capfd.readouterr().err


@pytest.mark.parametrize("way", ["kill", "crash"])
async def test_the_engines_death_ends_every_stream_and_call(way):
    async with fake_engine() as client:
        streams = [asyncio.create_task(collect(client, endless(f"r{i}"))) for i in range(3)]
        pid = int((await client.stats())["pid"])
        if way == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            streams.append(asyncio.create_task(collect(client, request("x", ids=(CRASHING_TOKEN,)))))
        for result in await asyncio.gather(*streams, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
        assert num_live(client) == 0
        assert ("-9" if way == "kill" else "9") in str(await client.death())
        assert not client.is_alive
        with pytest.raises(EngineDeadError):
            await client.stats()
        with pytest.raises(EngineDeadError):
            await collect(client, request("late"))


@pytest.mark.parametrize(("model", "error"), [(TOO_LARGE, MemoryPlanError), (CRASHING, EngineDeadError)])
async def test_a_start_that_fails_raises_its_own_error(model, error):
    with pytest.raises(JsgError) as caught:
        async with fake_engine(model_path=model):
            pass
    assert type(caught.value) is error


async def test_an_engine_that_compiles_ends_by_itself():
    client = await start_client(EngineConfig(), core="tests.engine.fake_core:CompilingCore")
    await client.close()
    assert client._child.wait() == 0, "it was not killed"


async def test_close_ends_streams_and_the_process_in_order():
    async with fake_engine() as client:
        stream = asyncio.create_task(collect(client, endless("r")))
        pid = int((await client.stats())["pid"])
    with pytest.raises(EngineDeadError, match="status 0"):
        await stream
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_the_socket_lies_in_an_owner_only_directory_that_goes_away():
    config = EngineConfig()
    child = EngineChild.spawn(config, core=FAKE_CORE)
    directory = Path(child.address.removeprefix("ipc://")).parent
    client = EngineClient(child, config)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    await client.ready()
    assert not directory.exists()
    assert tokens_of(await collect(client, request("r"))) == [1, 2, 3, 1, 2]
    await client.close()


async def test_the_child_leaves_ctrl_c_to_the_front(client: EngineClient):
    pid = int((await client.stats())["pid"])
    os.kill(pid, signal.SIGINT)
    assert os.getpgid(pid) != os.getpgid(0)
    assert tokens_of(await collect(client, request("r"))) == [1, 2, 3, 1, 2]


PARENT = f"""
import asyncio, sys
from jsg.config import EngineConfig
from jsg.engine.front.children import EngineChild
from jsg.engine.front.client import MAX_MESSAGES, EngineClient

async def main():
    config = EngineConfig()
    child = EngineChild.spawn(config, core={FAKE_CORE!r})
    client = EngineClient(child, config)
    await client.ready()
    print(child._process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_the_child_dies_when_its_parent_is_killed():
    env = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=env)
    assert parent.stdout is not None
    with parent, parent.stdout:
        child_pid = int(parent.stdout.readline())
        assert is_running(child_pid)
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + DEADLINE_S
        while is_running(child_pid):
            assert time.monotonic() < deadline, "the engine outlived its parent"
            time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


async def test_requests_of_one_moment_travel_in_one_message(client: EngineClient, monkeypatch):
    sent: list[int] = []
    send = client._channel.send
    monkeypatch.setattr(client._channel, "send", lambda frames: (sent.append(len(frames)), send(frames))[1])
    await asyncio.gather(*(collect(client, request(f"r{i}")) for i in range(20)))
    assert len(sent) == 1


async def test_points_for_snapshots_go_to_an_engine_that_keeps_states(client: EngineClient, monkeypatch):
    info, encode = client.info, client._encoder.encode
    sent: list[tuple[tuple[int, ...], int]] = []

    def seen(message: ToEngine) -> list[bytes | memoryview]:
        sent.extend((request.snapshot_at, request.turn_end) for request in message.requests)
        return encode(message)

    monkeypatch.setattr(client._encoder, "encode", seen)
    for caches_states in (False, True):
        monkeypatch.setattr(EngineClient, "info", dataclasses.replace(info, caches_states=caches_states))
        await collect(client, dataclasses.replace(request(f"r{caches_states}"), snapshot_at=(1, 3), turn_end=2))
    assert sent == [((), 0), ((1, 3), 2)]


async def test_steps_that_wait_are_taken_together(client: EngineClient, monkeypatch):
    """Otherwise a front that is slower than the engine falls behind without end, and no event has several tokens."""
    num, turns, taken = MAX_MESSAGES + 3, [0], []
    arrived = [[msgspec.msgpack.encode(FromEngine())] for _ in range(num)]
    receive = client._channel.receive

    async def next_message() -> list[bytes]:
        return arrived.pop() if arrived else await receive()

    def turn() -> None:
        turns[0] += 1
        if turns[0] < 100:
            asyncio.get_running_loop().call_soon(turn)

    monkeypatch.setattr(client._channel, "receive", next_message)
    monkeypatch.setattr(client, "_take", lambda message: taken.append(turns[0]))
    reading = asyncio.create_task(client._read())
    turn()
    while len(taken) < num:
        await asyncio.sleep(0)
    reading.cancel()
    first, second = [taken.count(number) for number in dict.fromkeys(taken)]
    assert (first, second) == (MAX_MESSAGES, 3)


async def test_config_survives_the_command_line():
    async with fake_engine(model_path='a "quoted" näme', mem_fraction_static=0.5) as client:
        assert client.info.model_path == 'a "quoted" näme'
    assert dataclasses.asdict(EngineConfig())  # every field is JSON's
