"""A thread beside the step loop works while no request runs, and little while requests run."""

import itertools

import pytest

from jsg.engine.device.pace import BUSY_SHARE, FIRST_REQUEST_S, QUIET_S, Pace


class Time:
    """A clock that stands still but for waits and work, and a program that is called every few milliseconds."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.busy_until = 0.0
        self.pace = Pace(clock=lambda: self.now, wait=self.wait)

    def wait(self, seconds: float) -> bool:
        self.run(min(seconds, QUIET_S / 10))
        return False

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        self.now += seconds
        if self.now < self.busy_until:
            self.pace.note_call()

    def do(self, seconds: float) -> float:
        """When a piece of work that takes so long began."""
        began: list[float] = []

        def work() -> None:
            began.append(self.now)
            self.run(seconds)

        self.pace.do(work)
        return began[0]


@pytest.fixture
def time() -> Time:
    return Time()


def test_the_first_request_has_the_engine_to_itself_and_then_nothing_rests(time: Time):
    start = time.now
    time.pace.begin()
    assert time.do(0.3) == pytest.approx(start + FIRST_REQUEST_S, abs=QUIET_S / 10)
    assert time.do(0.3) == time.now - 0.3
    assert time.now == pytest.approx(start + FIRST_REQUEST_S + 0.6, abs=QUIET_S / 10)


def test_work_begins_once_the_first_request_is_answered(time: Time):
    start = time.now
    time.pace.begin()
    time.busy_until = start + 0.2
    assert time.do(0.3) == pytest.approx(start + 0.2 + QUIET_S, abs=QUIET_S / 5)


def test_while_requests_run_work_takes_a_small_part_of_the_time(time: Time):
    time.pace.begin()
    time.busy_until = time.now + 1000
    began = [time.do(0.3) for _ in range(4)]
    gaps = [after - before for before, after in itertools.pairwise(began)]
    assert gaps == pytest.approx([0.3 / BUSY_SHARE] * 3, abs=QUIET_S / 10)


def test_work_goes_on_when_requests_have_ended(time: Time):
    time.pace.begin()
    time.busy_until = time.now + 2.0
    time.do(0.3)
    assert time.do(0.3) == pytest.approx(time.busy_until + QUIET_S, abs=QUIET_S / 5)


def test_work_that_raises_is_followed_by_a_rest_too(time: Time):
    time.pace.begin()
    time.busy_until = time.now + 1000

    def work() -> None:
        time.run(0.3)
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        time.pace.do(work)
    end = time.now
    assert time.do(0.3) == pytest.approx(end + 0.3 * (1 / BUSY_SHARE - 1), abs=QUIET_S / 10)


def test_nothing_is_done_once_it_is_closed(time: Time):
    time.pace.close()
    time.pace.do(lambda: pytest.fail("it is closed"))
    assert time.pace.is_closed


def test_closing_ends_a_wait():
    pace = Pace(wait=lambda seconds: True)
    pace.begin()
    pace.do(lambda: pytest.fail("it is closed"))
