"""`PerLoop`: each thing is made, and closed, on the loop that it belongs to."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Iterator

import pytest

from jsg.lang.streams import per_loop
from jsg.lang.streams.per_loop import PerLoop


class Thing:
    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.num_closed = 0

    async def close(self) -> None:
        assert asyncio.get_running_loop() is self.loop
        await asyncio.sleep(0)
        self.num_closed += 1


@pytest.fixture
def things() -> PerLoop[Thing]:
    return PerLoop(Thing, Thing.close)


async def others_end() -> None:
    """Waits until all other tasks of the loop have ended."""
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()}, return_exceptions=True)


@contextlib.contextmanager
def loop_in_a_thread() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        asyncio.run_coroutine_threadsafe(others_end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@pytest.fixture
def elsewhere() -> Iterator[asyncio.AbstractEventLoop]:
    with loop_in_a_thread() as loop:
        yield loop


async def made(things: PerLoop[Thing]) -> Thing:
    return things.here()


def made_on(things: PerLoop[Thing], loop: asyncio.AbstractEventLoop) -> Thing:
    return asyncio.run_coroutine_threadsafe(made(things), loop).result(30)


async def test_each_loop_has_one(things, elsewhere):
    one, same = (things.here(), things.here())
    assert one is same
    other = made_on(things, elsewhere)
    assert other is made_on(things, elsewhere) and other is not one
    things.shutdown()


async def test_s9_all_are_closed_wherever_they_are(things, elsewhere):
    other = made_on(things, elsewhere)

    own = things.here()
    await things.close()
    await things.close()
    assert things.here() is not own
    await things.close()
    own = own
    assert (own.num_closed, other.num_closed) == (1, 1)
    assert made_on(things, elsewhere) is not other
    things.shutdown()


def test_s9_code_that_is_no_coroutine_closes_them_too(things, elsewhere):
    other = made_on(things, elsewhere)
    things.shutdown()
    things.shutdown()
    assert other.num_closed == 1


def test_within_a_coroutine_its_own_is_closed_when_it_awaits(things, elsewhere, monkeypatch):
    monkeypatch.setattr(per_loop, "CLOSE_S", 600.0)  # nothing waits for what cannot go on
    other = made_on(things, elsewhere)

    async def main():
        own = things.here()
        things.shutdown()
        assert (own.num_closed, other.num_closed) == (0, 1)
        while not own.num_closed:
            await asyncio.sleep(0)

    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_loop_that_is_busy_is_not_waited_for_without_end(things, elsewhere, monkeypatch):
    monkeypatch.setattr(per_loop, "CLOSE_S", 0.05)
    other = made_on(things, elsewhere)
    go_on = threading.Event()
    elsewhere.call_soon_threadsafe(go_on.wait)
    things.shutdown()
    asyncio.run(things.close())
    assert other.num_closed == 0
    go_on.set()


def test_a_loop_that_has_ended_is_forgotten(things):
    first = asyncio.run(made(things))
    asyncio.run(things.close())
    things.shutdown()
    assert first.num_closed == 0
    second = asyncio.run(made(things))
    assert [loop is second.loop for loop in things._loops()] == [True]


def test_what_fails_there_is_raised_here(elsewhere):
    async def fail(_thing: Thing) -> None:
        raise OSError("broken")

    things = PerLoop(Thing, fail)
    made_on(things, elsewhere)
    with pytest.raises(OSError, match="broken"):
        things.shutdown()
    made_on(things, elsewhere)
    with pytest.raises(OSError, match="broken"):
        asyncio.run(things.close())


def test_a_forked_process_leaves_its_parents_alone(things, elsewhere, monkeypatch):
    """There the parent's loop seems to run."""
    other = made_on(things, elsewhere)
    parent = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: parent + 1)
        things.shutdown()
        asyncio.run(things.close())
    assert other.num_closed == 0
    things.shutdown()
    assert other.num_closed == 1


def test_many_threads_close_at_once(things, elsewhere):
    others = [made_on(things, elsewhere)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _number: things.shutdown(), range(64)))
    others.append(made_on(things, elsewhere))
    things.shutdown()
    assert [other.num_closed for other in others] == [1, 1]
