"""For how long a request waits outside of the engine."""

import asyncio
from collections import Counter

from jsg.waits import CLOCK, WaitClock, WaitReason, by_name, sum_of, waited_so_far, waiting


class Time:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_things_that_a_request_waits_for_at_the_same_time_count_once():
    counts, time = Counter[WaitReason](), Time()
    clock = WaitClock(counts, time)
    with clock.on(WaitReason.TEXT):
        time.now_s += 1
        with clock.on(WaitReason.TEXT), clock.on(WaitReason.MEDIA):
            time.now_s += 2
            assert counts == {WaitReason.TEXT: 1, WaitReason.MEDIA: 1}
            assert clock.waited == {WaitReason.TEXT: 3, WaitReason.MEDIA: 2}
        assert counts == {WaitReason.TEXT: 1, WaitReason.MEDIA: 0}
        time.now_s += 4
    assert not counts.total()
    time.now_s += 8
    assert clock.waited == {WaitReason.TEXT: 7, WaitReason.MEDIA: 2}


async def test_what_fails_or_is_cancelled_waits_no_more():
    counts = Counter[WaitReason]()

    CLOCK.set(WaitClock(counts))

    async def wait() -> None:
        with waiting(WaitReason.GRAMMAR):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(wait()) for _ in range(3)]
    await asyncio.sleep(0)
    assert counts[WaitReason.GRAMMAR] == 1, "all of them work for one request"
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert waited_so_far().keys() == {WaitReason.GRAMMAR}
    assert not counts.total()


def test_where_nobody_asks_nothing_is_counted():
    with waiting(WaitReason.TEXT):
        assert waited_so_far() == {}


def test_waits_add_up_and_the_longest_comes_first():
    both = sum_of((None, {WaitReason.ROWS: 1.0}, {WaitReason.ROWS: 2.0, WaitReason.PAGES: 4.00000049}))
    assert [*by_name(both).items()] == [("pages", 4.0), ("rows", 3.0)]
    assert sum_of((None, {})) is None and by_name(None) == {}
