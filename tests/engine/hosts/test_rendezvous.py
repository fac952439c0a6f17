"""The rendezvous: hosts connect in any order, twice, or with wrong messages, and other programs connect too."""

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from jsg.engine.hosts import rendezvous
from jsg.engine.hosts.rendezvous import Connections, Gathering, join
from jsg.engine.hosts.watch import FIRST_BEAT
from jsg.errors import ConfigError
from tests.engine.hosts.ports import free_address

DEADLINE_S = 60.0
"""No machine is so busy that a thread gets no turn for so long."""
SAME = {"jsg": "1", "--page-size": "1"}


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that fails leaves a leader that waits."""
    monkeypatch.setattr(rendezvous, "PATIENCE_S", DEADLINE_S)


@pytest.fixture
def address() -> str:
    return free_address()


@contextlib.contextmanager
def leader(address: str, num_hosts: int = 2) -> Iterator[Future[dict[int, Connections]]]:
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(Gathering(address, num_hosts, SAME).wait, lambda there, count: None)


def close(*connections: Connections) -> None:
    for each in connections:
        each.plan.close()
        each.beats.close()


def join_again(address: str, rank: int) -> Connections:
    """Calls until the leader has noticed that the host which had the rank is gone."""
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConfigError):  # it is there already
            return join(address, rank, SAME)
        time.sleep(0.05)
    raise AssertionError("the leader does not notice")


@pytest.mark.parametrize("leader_first", [True, False])
def test_any_order(address: str, leader_first: bool):
    with ThreadPoolExecutor(3) as pool:
        gathering = Gathering(address, 3, SAME)
        calls = [lambda: gathering.wait(lambda there, count: None)]
        calls += [lambda rank=rank: join(address, rank, SAME) for rank in (2, 1)]
        futures = []
        for call in calls if leader_first else calls[::-1]:
            futures.append(pool.submit(call))
            time.sleep(0.3)
        results = [future.result(DEADLINE_S) for future in futures]
    others = results[0] if leader_first else results[-1]
    assert sorted(others) == [1, 2]
    ranks = {1: results[2 if leader_first else 0], 2: results[1]}
    for rank, joined in ranks.items():
        assert joined.own_address == "127.0.0.1"
        for mine, theirs in ((others[rank].plan, joined.plan), (others[rank].beats, joined.beats)):
            mine.sendall(b"x")
            theirs.settimeout(DEADLINE_S)
            while theirs.recv(1) != b"x":  # signs of life, while others were waited for
                pass
            assert mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        close(others[rank], joined)


def test_a_host_that_differs_is_told_in_what_and_the_leader_waits_on(address: str):
    with leader(address) as gathered:
        with pytest.raises(ConfigError, match=r"the leader refuses this host: --page-size must be the same .* is 1 on"):
            join(address, 1, SAME | {"--page-size": "4"})
        with pytest.raises(ConfigError, match=r"--node-rank must be in \[1, 1\]"):
            join(address, 2, SAME)
        joined = join(address, 1, SAME)
        close(joined, *gathered.result(DEADLINE_S).values())


def test_a_rank_is_given_once(address: str):
    with leader(address, 3) as gathered:
        first = join(address, 1, SAME)
        with pytest.raises(ConfigError, match="--node-rank 1 is there already"):
            join(address, 1, SAME)
        second = join(address, 2, SAME)
        close(first, second, *gathered.result(DEADLINE_S).values())


def test_a_host_that_was_ended_meanwhile_may_come_again(address: str):
    with leader(address, 3) as gathered:
        close(join(address, 1, SAME))
        again, other = join_again(address, 1), join(address, 2, SAME)
        others = gathered.result(DEADLINE_S)
        others[1].plan.sendall(b"x")
        assert again.plan.recv(1) == b"x"
        close(again, other, *others.values())


def test_a_host_that_left_with_something_unread_may_come_again_too(address: str):
    with leader(address, 3) as gathered:
        first = join(address, 1, SAME)
        first.plan.sendall(b"unread")
        first.beats.sendall(b"unread")
        close(first)
        again, other = join_again(address, 1), join(address, 2, SAME)
        close(again, other, *gathered.result(DEADLINE_S).values())


def test_who_waits_for_others_hears_from_the_leader(address: str):
    with leader(address, 3) as gathered:
        first = join(address, 1, SAME)
        first.beats.settimeout(DEADLINE_S)
        assert [first.beats.recv(24) for _ in range(3)] == [FIRST_BEAT] * 3
        second = join(address, 2, SAME)
        close(first, second, *gathered.result(DEADLINE_S).values())


def test_strangers_who_say_nothing_end_no_start(address: str, monkeypatch: pytest.MonkeyPatch):
    """Between any two of them the leader gives a sign of life to who waits, so that it is not taken for lost."""
    assert rendezvous.HELLO_S + rendezvous.RETRY_S < 2, "the shortest --dist-timeout"
    monkeypatch.setattr(rendezvous, "HELLO_S", 0.1)
    events: list[str] = []

    def noted(name: str) -> None:
        real = getattr(Gathering, name)

        def spy(self: Gathering, *args: object) -> object:
            events.append(name)
            return real(self, *args)

        monkeypatch.setattr(Gathering, name, spy)

    noted("_greet")
    noted("_give_signs_of_life")
    with leader(address, 3) as gathered, contextlib.ExitStack() as strangers:
        first = join(address, 1, SAME)
        events.clear()
        for _ in range(5):
            strangers.enter_context(connected(address))
        second = join(address, 2, SAME)
        close(first, second, *gathered.result(DEADLINE_S).values())
    assert events.count("_greet") == 7
    assert ("_greet", "_greet") not in itertools.pairwise(events)


def test_a_stranger_who_dawdles_holds_nobody_up_for_long(address: str):
    with leader(address) as gathered, connected(address) as stranger:
        is_done = threading.Event()

        def dawdle() -> None:
            with contextlib.suppress(OSError):
                while not is_done.wait(0.2):
                    stranger.sendall(b"\x00")

        thread = threading.Thread(target=dawdle)
        thread.start()
        joined = join(address, 1, SAME)
        is_done.set()
        thread.join()
        close(joined, *gathered.result(DEADLINE_S).values())


@contextlib.contextmanager
def connected(address: str) -> Iterator[socket.socket]:
    """A connection to a leader that may not listen yet."""
    for _ in range(100):
        with contextlib.suppress(ConnectionRefusedError):
            connection = socket.create_connection(rendezvous.parse_address(address))
            break
        time.sleep(0.05)
    with connection:
        yield connection


def message(text: bytes) -> bytes:
    return len(text).to_bytes(4, "big") + text


@pytest.mark.parametrize(
    "said",
    [
        message(b"[" * 200_000),
        message(b'{"rank": 1, "token": "\\ud800"}'),
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x00\x00\x00\x02{}",
        b'\x00\x00\x00\x1b{"rank": 1, "token": "guess"}',
    ],
)
def test_strangers_are_dropped(address: str, said: bytes):
    with leader(address) as gathered:
        with connected(address) as stranger:
            with contextlib.suppress(OSError):  # the leader may have hung up already
                stranger.sendall(said)
                stranger.shutdown(socket.SHUT_WR)
            joined = join(address, 1, SAME)
        close(joined, *gathered.result(DEADLINE_S).values())


def test_nothing_listens_once_all_are_there(address: str):
    with leader(address) as gathered:
        joined = join(address, 1, SAME)
        others = gathered.result(DEADLINE_S)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(rendezvous.parse_address(address), 1)
    close(joined, *others.values())


def test_who_does_not_come_is_named(address: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rendezvous, "PATIENCE_S", 0.1)
    with pytest.raises(ConfigError, match=r"--node-rank 1, 2 did not call"):
        Gathering(address, 3, SAME).wait(lambda there, count: None)
    with pytest.raises(ConfigError, match="the leader must be there within"):
        join(address, 1, SAME)


def test_an_address_in_use_is_an_error(address: str):
    taken = socket.create_server(rendezvous.parse_address(address))
    with taken, pytest.raises(ConfigError, match="--dist-init-addr must be an address of the leader that is free"):
        Gathering(address, 2, SAME).wait(lambda there, count: None)


def test_the_port_of_the_coordinator_in_use_is_the_same_error(address: str):
    host, port = rendezvous.parse_address(address)
    with socket.create_server((host, port + 1)), pytest.raises(ConfigError, match=f"the port .* {port + 1} gave: "):
        Gathering(address, 2, SAME).wait(lambda there, count: None)
