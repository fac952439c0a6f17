"""For what requests wait: each reason, and that a step costs the same however many wait.

`SimulatedEngine` compares the seconds of every request in all tests of the scheduler with those that it counts itself.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from jsg.sched import scheduler, waits
from jsg.sched.vision_store import NUM_FIXED_ROWS
from jsg.types import Request
from jsg.waits import IN_THE_ENGINE, WHY, WaitReason
from jsg.window import Window
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_image_keys import image, request
from tests.sched.test_joined import joined
from tests.sched.test_scheduler import make_request
from tests.sched.test_states import asked, prompt
from tests.sched.token_model import TILE_ROWS, TokenModel

LONG = (1, 2, 3, 4, 5, 6, 1, 2, 3, 4)


def plain(rid: str, first: int = 0, **fields: int) -> Request:
    return make_request(rid, (first, *LONG), **fields)


def engine_of(**knobs: object) -> SimulatedEngine:
    shape = {"num_pages": 200, "context_length": 150} | knobs
    return SimulatedEngine(EngineShape(**shape), TokenModel(broken_every=10**9))  # pyright: ignore[reportArgumentType]


def three(**knobs: object) -> SimulatedEngine:
    engine = engine_of(**knobs)
    for number in range(3):
        engine.add(plain(f"r{number}", number))
    return engine


def overdue() -> SimulatedEngine:
    """One request needs more memory than is left, and small ones of a larger priority have passed it."""
    engine = engine_of(num_pages=30, context_length=30, chunk=16, max_bypass_tokens=16)
    engine.add(make_request("runs", (1,) * 10, max_new=12))
    engine.step()
    engine.add(make_request("large", (2,) * 18, max_new=2))
    for number in range(3, 6):
        engine.add(make_request(f"small {number}", (number,) * 8, max_new=1, priority=1))
    while not engine.scheduler.waits.get(WaitReason.OVERDUE):
        engine.add(make_request(f"later {engine.now_s}", (5, 4, 3), max_new=1, priority=1))
        engine.step()
    return engine


def shares_a_state() -> SimulatedEngine:
    engine, stem = engine_of(num_pages=500, num_states=8, chunk=256, context_length=400), prompt(100)
    for number in range(2):
        engine.add(asked(f"r{number}", (*stem, number, *prompt(40, seed=number + 2)), snapshot_at=(100,)))
    return engine


def pictures() -> SimulatedEngine:
    """The first has its picture encoded, the second has run as far as its own, and the third would read another one."""
    engine = engine_of(vision_rows=4 * TILE_ROWS + NUM_FIXED_ROWS, chunk=64)
    for number in range(3):
        engine.add(request(f"r{number}", (number,), image(0, *range(number, number + 3)), (3,)))
    return engine


def one(added: Request, **knobs: object) -> SimulatedEngine:
    engine = engine_of(**knobs)
    engine.add(added)
    return engine


CASES: dict[WaitReason, tuple[Callable[[], SimulatedEngine], dict[WaitReason, int]]] = {
    WaitReason.ROWS: (lambda: three(max_running=1), {WaitReason.ROWS: 2}),
    WaitReason.PAGES: (lambda: three(num_pages=20, context_length=20), {WaitReason.PAGES: 2}),
    WaitReason.STEP_TOKENS: (lambda: three(chunk=4), {WaitReason.STEP_TOKENS: 2}),
    WaitReason.PREFILL_TOKENS: (lambda: three(chunk=64, max_prefill_tokens=4), {WaitReason.PREFILL_TOKENS: 2}),
    WaitReason.WINDOWS: (lambda: three(windows=(Window(8),), part_rate=0.1, chunk=8), {WaitReason.WINDOWS: 2}),
    WaitReason.OVERDUE: (overdue, {WaitReason.PAGES: 1, WaitReason.OVERDUE: 4}),
    WaitReason.STATE: (shares_a_state, {WaitReason.STATE: 1}),
    WaitReason.PICTURES: (pictures, {WaitReason.PICTURES: 1}),
    WaitReason.BRANCHES: (lambda: one(joined("whole"), max_running=1, chunk=4), {WaitReason.BRANCHES: 1}),
}


@pytest.mark.parametrize("reason", CASES, ids=lambda reason: reason.value)
def test_a_request_waits_for_what_it_lacks(reason: WaitReason):
    make, expected = CASES[reason]
    engine = make()
    assert engine.scheduler.waits[WaitReason.NEXT_STEP] == engine.scheduler.num_waiting or reason is WaitReason.OVERDUE
    for _ in range(20):
        if +Counter(engine.scheduler.waits) == expected:
            break
        engine.step()
    assert +Counter(engine.scheduler.waits) == expected
    engine.run_until_idle()
    assert engine.scheduler.waits == {WaitReason.NEXT_STEP: 0}
    assert any(answer.waited[reason] for answer in engine.answers.values())
    engine.check_answers()


def test_much_work_on_the_tree_lets_requests_wait(monkeypatch: pytest.MonkeyPatch):
    engine = three(chunk=64)
    monkeypatch.setattr(scheduler, "MAX_TREE_WORK", -1)
    engine.step()
    assert +Counter(engine.scheduler.waits) == {WaitReason.TREE_WORK: 3}
    monkeypatch.undo()
    engine.run_until_idle()
    assert all(
        answer.waited == {WaitReason.NEXT_STEP: 1, WaitReason.TREE_WORK: 1} for answer in engine.answers.values()
    )


def test_every_reason_has_a_sentence_and_those_of_the_engine_a_case():
    assert [*WHY] == [*WaitReason]
    assert {*IN_THE_ENGINE} == CASES.keys() | {WaitReason.TREE_WORK, WaitReason.NEXT_STEP}


def test_an_abort_says_for_what_the_request_waited():
    engine = three(max_running=1, chunk=64)
    for _ in range(3):
        engine.step()
    engine.abort("r2")
    engine.step()
    assert engine.answers["r2"].waited == {WaitReason.NEXT_STEP: 1, WaitReason.ROWS: 2}
    engine.run_until_idle()
    engine.check_answers()


def calls_of_a_step(num_waiting: int) -> int:
    """The Python calls in `waits.py` while a step is planned and nobody is admitted."""
    engine = engine_of(max_running=1, max_queued=5000, chunk=64)
    for number in range(num_waiting + 1):
        engine.scheduler.add(make_request(f"r{number}", max_new=50), 0.0)
    engine.scheduler.plan(1.0)
    count, path = 0, Path(waits.__file__).name

    def look(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and Path(frame.f_code.co_filename).name == path

    sys.setprofile(look)
    try:
        engine.scheduler.plan(2.0)
    finally:
        sys.setprofile(None)
    assert engine.scheduler.waits[WaitReason.ROWS] == num_waiting
    return count


def test_a_step_costs_the_same_however_many_wait():
    assert 0 < calls_of_a_step(500) == calls_of_a_step(5) < 10
