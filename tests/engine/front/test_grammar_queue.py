"""The order in which grammars are compiled, with workers that a test can block."""

import asyncio
from typing import Any

import pytest

from jsg.engine.front import grammar_queue
from jsg.engine.front.grammar_queue import AT_ONCE, MOST_AT_ONCE, GrammarQueue
from jsg.errors import JsgError, QueueFullError
from jsg.types import GrammarSpec
from tests.engine.front.background import num_waiting

LONG_S = 60.0


def spec(text: str) -> GrammarSpec:
    return GrammarSpec("regex", text)


class Workers:
    """Each compiles until the test lets its grammar go."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.num_taken = 0
        self._gates: dict[str, asyncio.Event] = {}

    async def take(self) -> int:
        self.num_taken += 1
        return self.num_taken

    async def compile(self, worker: int, spec: GrammarSpec) -> str:
        self.begun.append(spec.text)
        await self._gate(spec.text).wait()
        if spec.text.startswith("bad"):
            raise JsgError(spec.text)
        return spec.text.upper()

    def let_go(self, *texts: str) -> None:
        for text in texts:
            self._gate(text).set()

    def _gate(self, text: str) -> asyncio.Event:
        return self._gates.setdefault(text, asyncio.Event())


class SkippingLoop(asyncio.SelectorEventLoop):
    """A loop whose clock can be set forward, so that no test depends on how fast the machine is."""

    def __init__(self) -> None:
        self._skipped_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self._skipped_s

    def skip(self, seconds: float) -> None:
        self._skipped_s += seconds


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Each test has a loop whose clock can be set forward."""
    return "asyncio", {"loop_factory": SkippingLoop}


def made(**options: float) -> tuple[Workers, GrammarQueue]:
    workers = Workers()
    return workers, GrammarQueue(
        workers.take, workers.compile, **({"quick_s": LONG_S, "wait_s": 10 * LONG_S} | options)
    )


async def skip(seconds: float) -> None:
    """Sets the clock forward and lets everything run that can by then."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SkippingLoop)
    loop.skip(seconds)
    await turns()


def ask(queue: GrammarQueue, text: str, owner: str = "") -> asyncio.Task:
    return asyncio.create_task(queue.run(spec(text), owner))


async def turns() -> None:
    """Lets everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_owners_are_served_in_turn_however_many_grammars_one_brings():
    workers, queue = made()
    many = [ask(queue, f"a{i}", "a") for i in range(100)]
    await turns()
    others = [ask(queue, "b0", "b"), ask(queue, "b1", "b"), ask(queue, "c0", "c")]
    await turns()
    assert workers.begun == ["a0", "a1"] and num_waiting(queue) == 101
    for _ in range(4):
        workers.let_go(workers.begun[-2], workers.begun[-1])
        await turns()
    assert workers.begun[:8] == ["a0", "a1", "a2", "b0", "c0", "a3", "b1", "a4"]
    workers.let_go(*(f"a{i}" for i in range(100)))
    assert await asyncio.gather(*others) == ["B0", "B1", "C0"]
    assert (await asyncio.gather(*many))[-1] == "A99"


async def test_what_nobody_waits_for_any_more_is_dropped():
    workers, queue = made()
    running = [ask(queue, "x"), ask(queue, "y")]
    gone = [ask(queue, f"a{i}", owner) for i in range(50) for owner in ("a", "b")]
    await turns()
    stays = ask(queue, "a7", "c")
    await turns()
    assert num_waiting(queue) == 50
    for task in gone:
        task.cancel()
    await turns()
    assert num_waiting(queue) == 1
    workers.let_go("x", "y", "a7")
    assert await asyncio.gather(*running, stays) == ["X", "Y", "A7"]
    assert workers.begun == ["x", "y", "a7"] and not queue._lines and not queue._jobs


async def test_what_has_begun_goes_on_when_nobody_waits_and_is_there_for_who_comes():
    workers, queue = made()
    first = ask(queue, "x")
    await turns()
    first.cancel()
    await turns()
    second = ask(queue, "x")
    await turns()
    workers.let_go("x")
    assert await second == "X" and workers.begun == ["x"]


async def test_what_is_slow_ends_when_nobody_waits_and_begins_anew_for_who_comes():
    workers, queue = made(quick_s=1)
    left_before, left_after = ask(queue, "x"), ask(queue, "y", "b")
    await turns()
    left_before.cancel()
    await skip(1)
    assert "x" not in [job.spec.text for job in queue._jobs.values()] and workers.begun == ["x", "y"]
    left_after.cancel()
    late = ask(queue, "y", "b")
    await turns()
    assert workers.begun == ["x", "y", "y"] and queue._num_slow == 0 and queue._begun == {"b": 1}
    workers.let_go("y")
    assert await late == "Y" and not queue._jobs


async def test_who_waits_too_long_is_told_to_come_later():
    workers, queue = made(wait_s=0.05)
    slow = [ask(queue, "x"), ask(queue, "y")]
    await turns()
    with pytest.raises(QueueFullError, match=r"may wait 0\.05 s .* try again later"):
        await queue.run(spec("late"), "")
    workers.let_go("x", "y")
    await asyncio.gather(*slow)
    assert workers.begun == ["x", "y"] and not queue._jobs


async def test_a_first_worker_that_starts_slowly_is_waited_for():
    workers, queue = made(wait_s=LONG_S)
    started = asyncio.Event()

    async def take() -> int:
        await started.wait()
        return 1

    queue._take = take
    asked = [ask(queue, text) for text in "xyz"]
    await skip(2 * LONG_S)
    assert not any(task.done() for task in asked)
    workers.let_go(*"xyz")
    started.set()
    assert await asyncio.gather(*asked) == ["X", "Y", "Z"]


async def test_one_owner_has_no_more_than_so_many_in_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammar_queue, "MAX_WAITING", 3)

    workers, queue = made()
    asked = [ask(queue, f"a{i}", "a") for i in range(5)]
    await turns()
    with pytest.raises(QueueFullError, match="at most 3 grammars"):
        await queue.run(spec("one more"), "a")
    asked += [ask(queue, "a4", "a"), ask(queue, "b", "b")]
    workers.let_go(*(f"a{i}" for i in range(5)), "b")
    await asyncio.gather(*asked)
    assert not queue._jobs


async def test_a_slow_grammar_lets_the_next_begin_but_not_without_bound():
    workers, queue = made()
    asked = [ask(queue, f"a{i}", "a") for i in range(10)]
    await turns()
    assert len(workers.begun) == AT_ONCE
    await skip(LONG_S)
    assert len(workers.begun) == MOST_AT_ONCE - 1, "one is left to others"
    asked += [ask(queue, f"b{i}", "b") for i in range(10)]
    await skip(LONG_S)
    assert workers.begun == ["a0", "a1", "a2", "b0"]
    workers.let_go(*(f"b{i}" for i in range(10)))
    await asyncio.gather(*asked[10:])
    assert len(workers.begun) == 3 + 10
    workers.let_go(*(f"a{i}" for i in range(10)))
    await asyncio.gather(*asked)
    assert not queue._begun and queue._num_slow == 0


async def test_a_failure_goes_to_all_who_asked_and_makes_room():
    workers, queue = made()
    asked = [ask(queue, f"bad{i % 5}") for i in range(10)]
    workers.let_go(*(f"bad{i}" for i in range(5)))
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(result) for result in results] == [f"bad{i % 5}" for i in range(10)]
    assert not queue._begun


async def test_a_worker_that_cannot_be_had_makes_room():
    workers, queue = made()

    async def none() -> int:
        raise JsgError("no worker")

    take, queue._take = queue._take, none
    for _ in range(2 * MOST_AT_ONCE):
        with pytest.raises(JsgError, match="no worker"):
            await queue.run(spec("a"), "")
    queue._take = take
    workers.let_go("a")
    assert await queue.run(spec("a"), "") == "A"


async def test_closing_fails_what_waits():
    workers, queue = made()
    asked = [ask(queue, text) for text in "xyz"]
    await turns()
    queue.close()
    workers.let_go("x", "y")
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert results[:2] == ["X", "Y"] and "ending" in str(results[2]) and workers.begun == ["x", "y"]


async def test_who_asks_after_the_end_is_told_at_once():
    workers, queue = made()
    queue.close()
    for _ in range(2):
        with pytest.raises(JsgError, match="ending"):
            await queue.run(spec("x"), "")
    assert not workers.begun


async def test_each_who_asked_gets_an_error_of_its_own():
    workers, queue = made()
    asked = [ask(queue, "bad") for _ in range(3)]
    await turns()
    workers.let_go("bad")
    errors = await asyncio.gather(*asked, return_exceptions=True)
    assert len({id(error) for error in errors}) == 3 and {str(error) for error in errors} == {"bad"}


async def test_a_burst_waits_while_quick_ones_are_compiled_but_not_for_ever():
    wait_s = LONG_S / 10

    workers, queue = made(wait_s=wait_s, quick_s=100 * LONG_S)
    burst = [ask(queue, f"a{i}") for i in range(20)]
    await turns()
    for number in range(5):
        workers.let_go(f"a{number}")
        await skip(0.9 * wait_s)
    assert not any(task.done() for task in burst[5:]), "they have waited for longer than they may without a quick one"
    await skip(1.1 * wait_s)
    for task in burst[7:]:
        with pytest.raises(QueueFullError, match="6 s"):
            await task
    late = [ask(queue, f"b{i}") for i in range(4)]
    for _ in range(20):
        await skip(0.9 * wait_s)
        queue._quick_at = asyncio.get_running_loop().time()
    for task in late:
        with pytest.raises(QueueFullError):
            await task
    workers.let_go("a5", "a6")
    assert await asyncio.gather(*burst[:7]) == [f"A{i}" for i in range(7)]
