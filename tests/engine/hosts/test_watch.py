"""What each side concludes from the beats of the other, with real sockets and short time-outs."""

import queue
import socket
import struct
import time

import pytest

from jsg.engine.hosts.watch import Standing, Watch

TIMEOUT_S = 1.5


class Result:
    """What a step gives."""

    def __init__(self, is_there: bool):
        self.is_there = is_there

    def is_ready(self) -> bool:
        return self.is_there


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
    for _ in range(2):
        pair.standing.begin(Result(is_there=False))
    deadline = time.monotonic() + 10
    while pair.reasons.empty() and time.monotonic() < deadline:
        pair.beat(num_begun, 1)
        time.sleep(0.1)
    assert pair.reason() == f"a step has taken more than 1.5 s (--dist-timeout), and {behind}"


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
