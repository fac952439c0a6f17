"""What each side concludes from the beats of the other, with real sockets and short time-outs."""

import contextlib
import queue
import socket
import struct
import threading
import time

import numpy as np
import pytest

from jsg.engine.hosts.watch import Standing, Watch
from jsg.engine.hosts.wire import CallCodec

TIMEOUT_S = 1.5


class Result:
    """What a step gives."""

    def __init__(self, is_there: bool, failure: Exception | None = None):
        self.is_there = is_there
        self.failure = failure

    def is_ready(self) -> bool:
        return self.is_there

    def block_until_ready(self) -> None:
        if self.failure is not None:
            raise self.failure


class TimedResult(Result):
    """What a step gives at a certain time."""

    def __init__(self, ends_at: float):
        super().__init__(is_there=False)
        self.ends_at = ends_at

    def is_ready(self) -> bool:
        return time.monotonic() >= self.ends_at


class Pair:
    """A leader's watch, and the socket of its follower, which the test speaks for."""

    def __init__(self, *, judges_steps: bool = True):
        mine, self.socket = socket.socketpair()
        self.socket.settimeout(5)
        self.standing = Standing()
        self.reasons: queue.Queue[str] = queue.Queue()
        self.watch = Watch({"host 1": mine}, self.standing, TIMEOUT_S, judges_steps=judges_steps, lost=self.reasons.put)

    def beat(self, num_begun: int = 0, num_done: int = 0, num_programs: int = 0) -> None:
        self.socket.sendall(struct.pack("<QQQ", num_begun, num_done, num_programs))

    def reason(self) -> str:
        return self.reasons.get(timeout=10)


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.watch.close()
    made.socket.close()


def test_beats_go_out_and_tell_how_far_this_host_is(pair: Pair):
    pair.standing.begin(Result(is_there=True))
    pair.standing.begin(Result(is_there=False))
    pair.standing.count_programs = lambda: 7
    deadline = time.monotonic() + 5
    said = ()
    while said != (2, 1, 7) and time.monotonic() < deadline:
        pair.beat()
        said = struct.unpack("<QQQ", pair.socket.recv(24))
    assert said == (2, 1, 7)


def test_a_host_whose_process_ends_is_lost_at_once(pair: Pair):
    started = time.monotonic()
    pair.socket.close()
    assert "host 1 is gone" in pair.reason()
    assert time.monotonic() - started < TIMEOUT_S


def test_a_silent_host_is_lost(pair: Pair):
    assert pair.reason() == "host 1 has given no sign of life for 1.5 s (--dist-timeout)"


def test_a_host_that_keeps_up_is_not(pair: Pair):
    deadline, number = time.monotonic() + 2 * TIMEOUT_S, 0
    while time.monotonic() < deadline:
        number += 1
        pair.standing.begin(Result(is_there=True))
        pair.beat(number, number, 3)
        time.sleep(0.1)
    assert pair.reasons.empty()
    assert pair.watch.num_programs == 3
    assert len(pair.standing.begun_at) < 10  # those that are computed everywhere are forgotten


@pytest.mark.parametrize(("num_begun", "behind"), [(1, "host 1 has not begun it"), (2, "host 1 has not computed it")])
def test_a_step_that_takes_too_long_names_who_is_behind(pair: Pair, num_begun: int, behind: str):
    for is_there in (True, False):
        pair.standing.begin(Result(is_there))
    deadline = time.monotonic() + 10
    while pair.reasons.empty() and time.monotonic() < deadline:
        pair.beat(num_begun, 1)
        time.sleep(0.1)
    assert pair.reason() == f"a step has taken more than 1.5 s (--dist-timeout), and {behind}"


def test_a_step_that_waits_for_the_one_before_it_has_its_own_time(pair: Pair):
    steps: list[TimedResult] = []
    for _ in range(5):  # each is sent when the one before it begins to be computed
        ends_at = (steps[-1].ends_at if steps else time.monotonic()) + 0.8 * TIMEOUT_S
        steps.append(TimedResult(ends_at))
        pair.standing.begin(steps[-1])
        while len(steps) > 1 and not steps[-2].is_ready():
            pair.beat(len(steps), sum(step.is_ready() for step in steps))
            time.sleep(0.05)
    assert pair.reasons.empty()


def test_a_step_that_is_never_there_on_the_leader_is_named(pair: Pair):
    pair.standing.begin(Result(is_there=False))
    deadline = time.monotonic() + 10
    while pair.reasons.empty() and time.monotonic() < deadline:
        pair.beat(1, 1)
        time.sleep(0.1)
    assert pair.reason() == "a step has taken more than 1.5 s (--dist-timeout), and this host has not computed it"


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
    deadline = time.monotonic() + 10
    while pair.reasons.empty() and time.monotonic() < deadline:
        pair.beat()
        time.sleep(0.1)
    assert pair.reason() == "a step has taken more than 1.5 s (--dist-timeout), and host 1 has not begun it"
    plan.shutdown(socket.SHUT_RDWR)
    thread.join()
    for each in (listener, plan, unread):
        each.close()
    assert pair.standing.waiting_since is None


def test_a_failed_step_is_not_computed_and_ends_a_host_that_follows():
    pair = Pair(judges_steps=False)
    pair.standing.begin(Result(is_there=True))
    pair.standing.begin(Result(is_there=True, failure=RuntimeError("connection reset")))
    assert pair.standing.num_done == 1
    assert pair.reason() == "a step has failed on this host: connection reset"
    pair.watch.close()
    pair.socket.close()


def test_a_failed_step_is_the_fault_of_the_host_that_is_gone():
    pair = Pair(judges_steps=False)
    pair.socket.close()
    pair.standing.begin(Result(is_there=True, failure=RuntimeError("connection reset")))
    assert "host 1 is gone" in pair.reason()
    pair.watch.close()


def test_a_follower_leaves_steps_to_the_leader_to_judge():
    pair = Pair(judges_steps=False)
    deadline = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < deadline:
        pair.standing.begin(Result(is_there=False))
        pair.beat()
        time.sleep(0.1)
    assert pair.reasons.empty()
    assert len(pair.standing.begun_at) < 10
    pair.watch.close()
    pair.socket.close()


def test_nobody_is_lost_after_the_stop(pair: Pair):
    pair.watch.stop()
    pair.socket.close()
    time.sleep(0.2)
    assert pair.reasons.empty()
