"""The thread around the core: whatever goes wrong, nobody waits forever and nobody else suffers."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from jsg.engine.child.protocol import Failure, Refusal
from jsg.engine.core import EngineCore
from jsg.engine.offline.driver import Driver
from jsg.errors import EngineDeadError, JsgError, QueueTimeoutError, RequestError
from jsg.types import FinishReason, FinishType, Request, RequestOutput

WAIT_S = 60


class ScriptedCore(EngineCore):
    """Gives one token a step to every request until it is aborted; each step waits for `gate`."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.gate = threading.Event()
        self.in_step = threading.Event()
        self.is_closed = False
        self.on_add: Callable[[Request], None] = lambda request: None
        self.overdue: list[Refusal] = []
        self.has_settled = True
        self.gate.set()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    @property
    def is_settled(self) -> bool:
        return self.has_settled

    def add(self, request: Request) -> None:
        self.on_add(request)
        self.requests[request.rid] = request

    def abort(self, rid: str) -> None:
        self.requests.pop(rid, None)

    def step(self) -> list[RequestOutput]:
        self.in_step.set()
        assert self.gate.wait(WAIT_S)
        return [RequestOutput(rid=rid, token_ids=(1,)) for rid in self.requests]

    def refuse_overdue(self) -> list[Refusal]:
        overdue, self.overdue = self.overdue, []
        for refusal in overdue:
            del self.requests[refusal.rid]
        return overdue

    def close(self) -> None:
        self.is_closed = True


class Ear:
    """A sink that remembers, and can be waited for."""

    def __init__(self) -> None:
        self.heard: list[RequestOutput | JsgError] = []
        self.got_one = threading.Event()
        self.got_error = threading.Event()

    def __call__(self, item: RequestOutput | JsgError) -> None:
        self.heard.append(item)
        self.got_one.set()
        if isinstance(item, JsgError):
            self.got_error.set()


@pytest.fixture
def core() -> ScriptedCore:
    return ScriptedCore()


@pytest.fixture
def driver(core: ScriptedCore) -> Iterator[Driver]:
    driver = Driver(core)
    yield driver
    core.gate.set()
    driver.close()


def request(rid: str) -> Request:
    return Request(rid=rid, input_ids=(1,))


def test_a_refusal_goes_to_the_sink_and_the_name_is_free_again(core: ScriptedCore, driver: Driver):
    def refuse(request: Request) -> None:
        raise RequestError("no", param="x")

    core.on_add = refuse
    ear = Ear()
    driver.submit(request("a"), ear)
    assert ear.got_error.wait(WAIT_S)
    core.on_add = lambda request: None
    second = Ear()
    driver.submit(request("a"), second)
    assert second.got_one.wait(WAIT_S) and isinstance(second.heard[0], RequestOutput)


def test_a_sink_that_raises_is_dropped_and_its_request_aborted(core: ScriptedCore, driver: Driver):
    loop = asyncio.new_event_loop()
    loop.close()
    driver.submit(request("gone"), lambda item: loop.call_soon_threadsafe(print, item) and None)
    ear = Ear()
    driver.submit(request("stays"), ear)
    assert ear.got_one.wait(WAIT_S)
    assert driver.call(lambda core: "gone" not in core.requests) and not driver.is_closed


def test_what_is_asked_while_it_closes_is_answered(core: ScriptedCore, driver: Driver):
    core.gate.clear()
    first, late = Ear(), Ear()
    driver.submit(request("a"), first)
    assert core.in_step.wait(WAIT_S)
    answers: list[int] = []
    asking = threading.Thread(target=lambda: answers.append(driver.call(lambda core: 7)))
    asking.start()
    driver.submit(request("b"), late)
    while len(driver._to_do) < 2:
        time.sleep(0.001)
    closing = threading.Thread(target=driver.close)
    closing.start()
    while not driver.is_closed:
        time.sleep(0.001)
    core.gate.set()
    closing.join(WAIT_S)
    asking.join(WAIT_S)
    assert answers == [7]
    assert isinstance(first.heard[-1], EngineDeadError)
    assert isinstance(late.heard[-1], EngineDeadError)
    assert core.is_closed
    with pytest.raises(EngineDeadError):
        driver.submit(request("c"), Ear())
    driver.abort("a")


def test_a_request_that_raises_fails_alone(core: ScriptedCore, driver: Driver):
    def fail(request: Request) -> None:
        raise TypeError("a bug")

    good, bad, next_one = Ear(), Ear(), Ear()
    driver.submit(request("good"), good)
    assert good.got_one.wait(WAIT_S)
    core.on_add = fail
    driver.submit(request("bad"), bad)
    assert bad.got_error.wait(WAIT_S) and "a bug" in str(bad.heard[-1])
    assert type(bad.heard[-1]) is JsgError
    core.on_add = lambda request: None
    driver.submit(request("next"), next_one)
    assert next_one.got_one.wait(WAIT_S)
    assert not good.got_error.is_set()


def test_a_request_that_waited_too_long_hears_so(core: ScriptedCore, driver: Driver):
    ear, other = Ear(), Ear()
    driver.submit(request("a"), ear)
    driver.submit(request("b"), other)
    assert other.got_one.wait(WAIT_S)
    core.overdue = [Refusal("a", Failure.of(QueueTimeoutError("too long")))]
    assert ear.got_error.wait(WAIT_S) and type(ear.heard[-1]) is QueueTimeoutError
    assert not driver.is_closed


def test_a_failure_that_nobody_expected_is_heard_by_all(core: ScriptedCore, driver: Driver):
    first, second = Ear(), Ear()
    driver.submit(request("a"), first)
    driver.submit(request("b"), second)
    assert second.got_one.wait(WAIT_S)

    def fail() -> list[RequestOutput]:
        raise TypeError("a bug")

    core.step = fail
    for ear in (first, second):
        assert ear.got_error.wait(WAIT_S) and isinstance(ear.heard[-1], EngineDeadError)
        assert "a bug" in str(ear.heard[-1])
    with pytest.raises(EngineDeadError, match="a bug"):
        driver.call(lambda core: 1)


def test_the_end_of_a_request_is_the_last_thing_its_sink_hears(core: ScriptedCore, driver: Driver):
    ear = Ear()
    end = RequestOutput(rid="a", finish=FinishReason(FinishType.LENGTH))
    core.step = lambda: [end]  # pyright: ignore[reportAttributeAccessIssue]
    driver.submit(request("a"), ear)
    assert ear.got_one.wait(WAIT_S)
    driver.call(lambda core: core.abort("a"))
    assert ear.heard == [end]


def test_what_is_compiled_while_nothing_runs_is_run_although_nobody_asks_anything(core: ScriptedCore):
    """The thread that compiles tells nobody. When it has ended, the driver waits for actions only."""
    core.has_settled = False
    driver = Driver(core)
    assert not core.in_step.wait(0.01)
    core.requests["a program that is ready"] = None  # pyright: ignore[reportArgumentType]
    assert core.in_step.wait(WAIT_S)
    core.requests.clear()
    core.has_settled = True
    driver.close()
