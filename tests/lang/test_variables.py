"""A variable: set once, awaited from everywhere, its text followed while it grows."""

import asyncio
import contextvars
import threading

import pytest

from jsg.lang.streams.loop import Loop, shared_loop
from jsg.lang.streams.variables import Variable, gather, known


def test_it_is_set_once():
    variable = Variable()
    variable.finish(1, {"a": 1})
    variable.finish(2)
    variable.fail(ValueError())
    assert variable.now() == variable.wait() == 1 and variable.meta == {"a": 1} and variable.error is None


def test_waiters_of_every_kind_are_told():
    variable = Variable()
    got = []
    threads = [threading.Thread(target=lambda: got.append(variable.wait())) for _ in range(3)]

    async def wait():
        got.append(await variable.get())

    for thread in threads:
        thread.start()
    tasks = [shared_loop().submit(wait()) for _ in range(3)]
    other = threading.Thread(target=lambda: asyncio.run(wait()))
    other.start()
    variable.finish("v")
    for thread in (*threads, other):
        thread.join()
    for task in tasks:
        task.result()
    assert got == ["v"] * 7


def test_waiting_says_that_it_is_wanted_once():
    wanted = []
    variable = Variable(lambda: wanted.append(1))
    for _ in range(2):
        with pytest.raises(TimeoutError):
            variable.wait(0)
    assert wanted == [1] and variable.is_wanted


async def test_a_waiter_that_gave_up_is_forgotten():
    variable = Variable()
    with pytest.raises(TimeoutError):
        variable.wait(0)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(variable.get(), 0.001)
    pieces = variable.follow_async()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(pieces), 0.001)
    assert variable._on_done == [] and variable._on_change == []
    variable.finish(1)


def test_followers_see_every_piece_once_whenever_they_come():
    variable = Variable()
    results = []

    def follow() -> None:
        results.append(list(variable.follow()))

    threads = []
    for i in range(200):
        if i % 20 == 0:
            threads.append(threading.Thread(target=follow))
            threads[-1].start()
        variable.add(str(i))
    variable.finish(None)
    for thread in threads:
        thread.join()
    assert results == [[str(i) for i in range(200)]] * 10
    assert list(variable.follow()) == results[0]


def test_following_up_to_a_mark():
    log, mark = Variable(), Variable()
    log.add("a")
    log.add("b")
    mark.finish(1)
    assert list(log.follow(mark)) == ["a"]
    failed = Variable()
    failed.fail(ValueError("no"))
    pieces = log.follow(failed)
    assert [next(pieces), next(pieces)] == ["a", "b"]
    with pytest.raises(ValueError, match="no"):
        next(pieces)


def test_gathering():
    first, second = Variable(), Variable()
    both = gather([first, None, second, known(3)])
    second.finish(2)
    assert not both.is_done
    first.finish(1)
    assert both.now() == [1, None, 2, 3]
    failing = gather([known(1), second_failing := Variable()])
    second_failing.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        failing.now()


def test_wanting_a_gathered_value_wants_its_sources():
    source = Variable()
    both = gather([source])
    with pytest.raises(TimeoutError):
        both.wait(0)
    assert source.is_wanted


def test_a_burst_of_calls_wakes_the_loop_once():
    wakes = []

    class Counting:
        def call_soon_threadsafe(self, call, context) -> None:
            wakes.append(call)

    loop = Loop(Counting(), thread_id=0)
    done = []
    for i in range(100):
        loop.post(lambda i=i: done.append(i))
    assert len(wakes) == 1 and done == []
    wakes[0]()
    assert done == list(range(100))
    loop.post(lambda: done.append("again"))
    assert len(wakes) == 2


def test_a_call_that_fails_does_not_lose_the_others():
    reported = []

    class Loopless:
        def call_soon_threadsafe(self, call, context) -> None:
            self.call = call

        def call_exception_handler(self, context) -> None:
            reported.append(context["exception"])

    inner = Loopless()
    loop = Loop(inner, thread_id=0)
    done = []
    loop.post(lambda: 1 / 0)
    loop.post(lambda: done.append(1))
    inner.call()
    assert done == [1] and isinstance(reported[0], ZeroDivisionError)


def test_a_coroutine_does_not_see_the_context_of_who_submits_it():
    asker = contextvars.ContextVar("asker", default="nobody")

    async def ask():
        return asker.get()

    asker.set("the caller")
    assert shared_loop().submit(ask()).result(30) == "nobody"


def test_a_chain_of_variables_may_be_long():
    """Whether it is set, or wanted, or fails: thousands of joins into each other are no nested calls."""
    num_wanted = []
    for error in (None, ValueError("at the bottom")):
        first = last = Variable(lambda: num_wanted.append(1))
        for _ in range(5000):
            last = gather([last])
        last.want()
        if error is None:
            first.finish("v")
        else:
            first.fail(error)
        assert last.is_done and last.error is error
    assert len(num_wanted) == 2


def test_a_callback_that_fails_leaves_later_calls_as_they_are():
    first, second, got = Variable(), Variable(), []

    def fails():
        raise ValueError("wrong")

    first.when_done(fails)
    with pytest.raises(ValueError, match="wrong"):
        first.finish(1)
    second.when_done(lambda: got.append(second.now()))
    second.finish(2)
    assert got == [2]
