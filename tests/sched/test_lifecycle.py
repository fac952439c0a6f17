"""The states of a request: what it passes through, and what it cannot do."""

import pytest

from jsg.sched.request import NEXT_STATES, RequestState, RunningRequest
from jsg.types import FinishReason, FinishType
from tests.sched.simulated import SimulatedEngine
from tests.sched.test_joined import joined
from tests.sched.test_scheduler import make_engine, make_request

WAITING, JOINING, RUNNING, KEPT, ENDED = list(RequestState)[1:]


def live(engine: SimulatedEngine, rid: str) -> RunningRequest:
    return engine.scheduler._requests.live[rid]


def states(engine: SimulatedEngine, running: RunningRequest) -> list[RequestState]:
    """The states between steps, each once in a row, until nothing is left to do."""
    seen = [running.state]
    while engine.has_work:
        engine.step()
        if running.state is not seen[-1]:
            seen.append(running.state)
    return seen


def test_a_request_waits_runs_and_ends():
    engine = make_engine(max_running=1)
    engine.add(make_request("first"))
    engine.add(make_request("second"))
    assert states(engine, live(engine, "second")) == [WAITING, RUNNING, ENDED]


def test_a_retracted_request_waits_again():
    engine = make_engine(num_pages=30, conservativeness=0.01, context_length=30)
    for number in range(3):
        engine.add(make_request(f"r{number}", (number,) * 3, max_new=20))
    assert states(engine, live(engine, "r2")) == [WAITING, RUNNING, WAITING, RUNNING, ENDED]


def test_a_held_prompt_is_kept_until_it_is_aborted():
    engine = make_engine()
    engine.add(make_request("held", max_new=0, hold=True))
    running = live(engine, "held")
    assert states(engine, running) == [WAITING, RUNNING, KEPT]
    engine.abort("held")
    assert states(engine, running) == [ENDED]


def test_branches_are_kept_until_their_joined_request_runs():
    engine = make_engine(chunk=4)
    engine.add(joined("whole"))
    engine.step()
    (join,) = engine.scheduler.joins
    first = join.branches[0]
    while first.state is not KEPT:
        engine.step()
    assert join.whole.state is JOINING
    assert states(engine, join.whole) == [JOINING, RUNNING, ENDED]
    assert first.state is ENDED and first.kept is None
    engine.check_answers()


@pytest.mark.parametrize("num_steps", range(8))
def test_every_state_has_one_way_out(num_steps: int):
    """Whatever is waiting, joining, running or kept by then: ended once, it has given back everything."""
    engine = make_engine(max_running=2, chunk=8)
    engine.add(make_request("held", (7,) * 6, max_new=0, hold=True))
    engine.add(joined("whole"))
    engine.add(make_request("plain"))
    for _ in range(num_steps):
        engine.step()
    requests = engine.scheduler._requests
    branches = [branch for join in requests.joins for branch in join.branches]
    everybody = [*requests.live.values(), *requests.holds.values()]
    for running in everybody:
        requests.end(running, FinishReason(FinishType.ABORT, message="aborted"))
        engine.answers[running.request.rid].is_aborted = True
        engine.check_integrity()
    assert all(running.state is ENDED for running in (*everybody, *branches))
    for running in everybody:
        with pytest.raises(AssertionError, match="that is ended has nothing to give back"):
            requests.end(running)
    engine.run_until_idle()
    engine.check_answers()


def test_a_state_that_may_not_follow_is_refused():
    running = RunningRequest(make_request("r"), 0, None, 0, 0)  # pyright: ignore[reportArgumentType]
    for state in RequestState:
        for following in set(RequestState) - set(NEXT_STATES[state]):
            running.state = state
            with pytest.raises(AssertionError, match=f"that is {state.value} becomes {following.value}"):
                running.enter(following)
            assert running.state is state
