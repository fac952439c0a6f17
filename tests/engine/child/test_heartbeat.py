"""The heartbeat: what the front sees of an engine that is stopped, that hangs, and that is well."""

import asyncio
import dataclasses
import os
import select
import signal
import struct
import time
from collections.abc import Callable

import pytest

from jsg.engine.child import heartbeat
from jsg.engine.child.heartbeat import HeartbeatMonitor, HeartbeatSender, LoopClock
from jsg.errors import EngineDeadError
from tests.engine.fake_core import HANGING_TOKEN
from tests.engine.front.test_client import collect, endless, fake_engine, request, tokens_of

DEADLINE_S = 60  # on a busy machine too


class Pipe:
    """A monitor, the other end of its pipe, and a time that the test sets."""

    def __init__(self) -> None:
        reading, self.writing = os.pipe()
        self.now = 100.0
        self.monitor = HeartbeatMonitor(reading, lambda: self.now)

    def beat(self, *turns: int) -> None:
        os.write(self.writing, b"".join(struct.pack("<Q", number) for number in turns))

    def watch(self, seconds: float) -> None:
        """Lets time pass in which the front runs, and looks as often as it does."""
        for _ in range(round(seconds / heartbeat.MOST_UNSEEN_S)):
            self.now += heartbeat.MOST_UNSEEN_S
            assert not self.monitor.is_stalled


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        await asyncio.sleep(0.02)


def test_silence_is_a_stall_and_a_beat_ends_it():
    pipe = Pipe()
    pipe.now += 1000
    assert not pipe.monitor.is_stalled, "an engine that has not begun to beat is still starting"
    pipe.beat(1)
    assert pipe.monitor.read()
    pipe.watch(heartbeat.TIMEOUT_S)
    assert not pipe.monitor.is_stalled
    pipe.now += 0.1
    assert pipe.monitor.is_stalled
    assert pipe.monitor.read(), "nothing to read is no end"
    assert pipe.monitor.is_stalled
    pipe.beat(1)
    pipe.monitor.read()
    assert not pipe.monitor.is_stalled


def test_time_in_which_the_front_did_not_run_is_no_stall():
    pipe = Pipe()
    pipe.beat(1)
    pipe.monitor.start_watch()
    pipe.now += 60
    pipe.beat(2)  # it waits in the pipe until the front runs again
    assert not pipe.monitor.is_stalled and pipe.monitor.stuck_s == 0
    pipe.now += 60  # as when the machine slept, and the engine with it
    assert not pipe.monitor.is_stalled and pipe.monitor.stuck_s <= heartbeat.MOST_UNSEEN_S
    pipe.watch(heartbeat.TIMEOUT_S - heartbeat.MOST_UNSEEN_S)
    pipe.now += 0.1
    assert pipe.monitor.is_stalled


def test_beats_without_turns_show_a_loop_that_hangs():
    pipe = Pipe()
    pipe.now += 50
    pipe.monitor.start_watch()
    assert pipe.monitor.stuck_s == 0
    for turns, stuck_s in ((7, 0), (7, 1), (7, 2), (8, 0), (8, 1)):
        pipe.now += 1
        pipe.beat(turns)
        pipe.monitor.read()
        assert pipe.monitor.stuck_s == stuck_s and not pipe.monitor.is_stalled


def test_of_many_beats_the_last_counts_and_the_end_is_told():
    pipe = Pipe()
    pipe.beat(*range(2000))
    os.close(pipe.writing)
    assert not pipe.monitor.read() and pipe.monitor._num_turns == 1999
    assert not pipe.monitor.read()
    pipe.monitor.close()


def test_a_full_pipe_keeps_nobody_waiting_and_a_closed_one_ends_the_thread(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.001)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    while select.select([], [writing], [], 0)[1]:
        os.write(writing, bytes(8))
    sender = HeartbeatSender(writing, LoopClock())
    time.sleep(0.02)
    assert sender._thread.is_alive()
    os.close(reading)
    sender._thread.join(DEADLINE_S)
    assert not sender._thread.is_alive()
    sender.stop()


def test_the_clock_adds_up():
    clock = LoopClock()
    clock.add(idle_s=1.0, busy_s=0.25)
    clock.add(idle_s=0.0, busy_s=0.5)
    assert dataclasses.asdict(clock) == {"num_turns": 2, "idle_s": 1.0, "busy_s": 0.75}


async def test_a_stopped_engine_is_stalled_until_it_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(heartbeat, "TIMEOUT_S", 4.0)  # of which a busy machine may take some

    async with fake_engine() as client:
        pid = int((await client.stats())["pid"])
        assert not client.is_stalled
        running = asyncio.create_task(collect(client, request("r", max_new_tokens=100)))
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: client.is_stalled)
        assert client.is_alive, "it may go on"
        os.kill(pid, signal.SIGCONT)
        await until(lambda: not client.is_stalled)
        assert len(tokens_of(await running)) == 100


async def test_an_idle_engine_turns_and_says_how_it_spends_its_time():
    async with fake_engine(watchdog_timeout=4) as client:
        started, before = time.monotonic(), await client.stats()
        await asyncio.sleep(5)
        after, elapsed_s = await client.stats(), time.monotonic() - started
        assert after["num_turns"] > before["num_turns"] + 2
        assert 1 < after["idle_s"] - before["idle_s"] < elapsed_s
        await collect(client, request("r", max_new_tokens=200))  # 2 ms each
        busy = await client.stats()
        assert busy["busy_s"] - after["busy_s"] >= 0.4
        assert client.is_alive


@pytest.mark.parametrize("way", ["hang", "stop"])
async def test_an_engine_that_makes_no_step_is_ended(way: str, caplog: pytest.LogCaptureFixture):
    async with fake_engine(watchdog_timeout=1) as client:
        pid = int((await client.stats())["pid"])
        bystander = asyncio.create_task(collect(client, endless("bystander")))
        await client.stats()
        if way == "hang":
            asyncio.get_running_loop().create_task(_ignore_death(client))
        else:
            os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="-9"):
            await bystander
        assert not client.is_stalled
    assert "--watchdog-timeout" in caplog.text


async def _ignore_death(client) -> None:
    with pytest.raises(EngineDeadError):
        await collect(client, request("hangs", ids=(HANGING_TOKEN,)))
