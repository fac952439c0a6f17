"""What each side concludes from the beats of the other, with real sockets and a clock that the test sets."""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from jsg.engine.hosts import watch
from jsg.engine.hosts.watch import Standing, Watch
from jsg.engine.hosts.wire import CallCodec

TIMEOUT_S = 1.5
DEADLINE_S = 60.0
"""No machine is so busy that a thread gets no turn for so long."""


class Clock:
    """Stands in the module for `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Result:
    """The result of a step."""

    def __init__(self, is_there: bool, failure: Exception | None = None):
        self.is_there = is_there
        self.failure = failure

    def is_ready(self) -> bool:
        return self.is_there

    def block_until_ready(self) -> None:
        if self.failure is not None:
            raise self.failure


class Pair:
    """A leader's watch, and the socket of its follower, which the test speaks for."""

    def __init__(self, clock: Clock, *, judges_steps: bool = True):
        mine, self.socket = socket.socketpair()
        self.socket.settimeout(DEADLINE_S)
        self.clock = clock
        self.standing = Standing()
        self.reasons: queue.Queue[str] = queue.Queue()
        self.num_beats = 0
        self.watch = Watch({"host 1": mine}, self.standing, TIMEOUT_S, judges_steps=judges_steps, lost=self.reasons.put)

    def beat(self, num_begun: int = 0, num_done: int = 0) -> None:
        """The follower gives a sign of life; returns when the leader has it, or has lost the follower."""
        self.num_beats += 1
        self.socket.sendall(struct.pack("<QQQ", num_begun, num_done, self.num_beats))
        until(lambda: self.watch.num_programs == self.num_beats or not self.reasons.empty())

    def beat_until_lost(self, num_begun: int = 0, num_done: int = 0) -> str:
        """Why, though the follower beats; for no longer than ten time-outs."""
        for _ in range(20):
            self.beat(num_begun, num_done)
            self.clock.now += TIMEOUT_S / 2
        return self.reason()

    def reason(self) -> str:
        return self.reasons.get(timeout=DEADLINE_S)

    def close(self) -> None:
        self.watch.close()
        self.socket.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "it does not come about"
        time.sleep(0.001)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watch, "time", made)
    monkeypatch.setattr(watch, "INTERVAL_S", 0.01)
    return made


@pytest.fixture
def pair(clock: Clock) -> Iterator[Pair]:
    with contextlib.closing(Pair(clock)) as made:
        yield made


@pytest.fixture
def follower(clock: Clock) -> Iterator[Pair]:
    with contextlib.closing(Pair(clock, judges_steps=False)) as made:
        yield made


def test_beats_go_out_and_tell_how_far_this_host_is(pair: Pair):
    pair.standing.begin(Result(is_there=True))
    pair.standing.begin(Result(is_there=False))
    pair.standing.count_programs = lambda: 7
    said = ()
    while said != (2, 1, 7):
        pair.clock.now += watch.INTERVAL_S
        pair.beat()
        said = struct.unpack("<QQQ", pair.socket.recv(24, socket.MSG_WAITALL))


def test_a_host_whose_process_ends_is_lost_at_once(pair: Pair):
    pair.socket.close()
    assert "host 1 is gone" in pair.reason()


def test_a_silent_host_is_lost(pair: Pair):
    pair.beat()
    pair.clock.now += TIMEOUT_S + 0.1
    assert pair.reason() == "host 1 has given no sign of life for 1.5 s (--dist-timeout)"


def test_a_host_that_keeps_up_is_not(pair: Pair):
    for number in range(1, 20):
        pair.standing.begin(Result(is_there=True))
        pair.beat(number, number)
        pair.clock.now += TIMEOUT_S / 2
    pair.beat(19, 19)
    assert pair.reasons.empty() and pair.watch.num_programs == pair.num_beats
    until(lambda: not pair.standing.begun_at)  # those that are computed everywhere are forgotten


@pytest.mark.parametrize(("num_begun", "behind"), [(1, "host 1 has not begun it"), (2, "host 1 has not computed it")])
def test_a_step_that_takes_too_long_names_who_is_behind(pair: Pair, num_begun: int, behind: str):
    for is_there in (True, False):
        pair.standing.begin(Result(is_there))
    reason = pair.beat_until_lost(num_begun, 1)
    assert reason == f"a step has taken more than 1.5 s (--dist-timeout), and {behind}"


def test_a_step_that_waits_for_the_one_before_it_has_its_own_time(pair: Pair):
    """Two are sent at a time, and each takes nearly as long as a step may."""
    steps = [Result(is_there=False) for _ in range(6)]
    pair.standing.begin(steps[0])
    for number, step in enumerate(steps[1:], 1):
        pair.standing.begin(step)
        pair.clock.now += 0.8 * TIMEOUT_S
        steps[number - 1].is_there = True
        pair.beat(number, number)
        until(lambda: len(pair.standing.begun_at) == 1)  # that the one before is computed everywhere is noted
    assert pair.reasons.empty()


def test_a_step_that_is_never_there_on_the_leader_is_named(pair: Pair):
    pair.standing.begin(Result(is_there=False))
    reason = pair.beat_until_lost(1, 1)
    assert reason == "a step has taken more than 1.5 s (--dist-timeout), and this host has not computed it"


def test_a_leader_that_is_held_up_in_a_call_loses_who_does_not_read(pair: Pair):
    listener = socket.create_server(("127.0.0.1", 0))
    plan, unread = socket.create_connection(listener.getsockname()), listener.accept()[0]
    array = np.zeros(2**24, np.uint8)
    codec = CallCodec({"encode": [array]})

    def call() -> None:
        with contextlib.suppress(OSError), pair.standing.calling():
            codec.send([plan], "encode", [array])

    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: pair.standing.waiting_since is not None)
    reason = pair.beat_until_lost()
    assert reason == "a step has taken more than 1.5 s (--dist-timeout), and host 1 has not begun it"
    plan.shutdown(socket.SHUT_RDWR)
    thread.join()
    for each in (listener, plan, unread):
        each.close()
    assert pair.standing.waiting_since is None


def test_a_failed_step_is_not_computed_and_ends_a_host_that_follows(follower: Pair):
    follower.standing.begin(Result(is_there=True))
    follower.standing.begin(Result(is_there=True, failure=RuntimeError("connection reset")))
    assert follower.standing.num_done == 1
    assert follower.reason() == "a step has failed on this host: connection reset"


def test_a_failed_step_is_the_fault_of_the_host_that_is_gone(follower: Pair):
    follower.socket.close()
    follower.standing.begin(Result(is_there=True, failure=RuntimeError("connection reset")))
    assert "host 1 is gone" in follower.reason()


def test_a_follower_leaves_steps_to_the_leader_to_judge(follower: Pair):
    for _ in range(20):
        follower.standing.begin(Result(is_there=False))
        follower.beat()
        follower.clock.now += TIMEOUT_S / 2
    follower.beat()
    assert follower.reasons.empty()
    until(lambda: not follower.standing.begun_at)


def test_nobody_is_lost_after_the_stop(pair: Pair):
    pair.watch.stop()
    pair.socket.close()
    pair.clock.now += 2 * TIMEOUT_S
    assert not pair.watch._thread.is_alive() and pair.reasons.empty()
