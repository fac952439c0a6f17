"""How the hosts of an engine meet: the leader listens at `--dist-init-addr`, and the followers call in any order.

Each follower has two connections: one for messages and calls, and one for beats. The leader tells a caller that is no
host of this engine why it is refused, and goes on waiting. Standard library only.
"""

import contextlib
import dataclasses
import logging
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from jsg.engine.hosts.address import parse_address
from jsg.engine.hosts.identity import difference
from jsg.engine.hosts.watch import FIRST_BEAT
from jsg.engine.hosts.wire import WireError, receive_message, send_message
from jsg.errors import ConfigError

logger = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""How long hosts wait for each other's start."""
RETRY_S = 0.25
HELLO_S = 0.5
"""A caller must say in this time who it is. Meanwhile the leader sends no beats, and `--dist-timeout` may be 2 s."""
ANSWER_S = 5.0  # the leader must answer a host in this time
KEEPALIVE_S = 60
TOKEN_BYTES = 16

Arrived = Callable[[int, int], None]
"""Called with (hosts that are there, hosts in all) while the leader waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Connections:
    """The connections between two hosts.

    Attributes:
        own_address: The address at which the other host reaches this one.
        plan: For messages, then for calls.
        beats: For signs of life.
    """

    own_address: str
    plan: socket.socket
    beats: socket.socket


@final
class Gathering:
    """The leader's side: waits until every follower is there.

    Args:
        address: `--dist-init-addr`.
        num_hosts: All hosts with the leader.
        identity: What must be the same on the others.
    """

    def __init__(self, address: str, num_hosts: int, identity: Mapping[str, str]):
        self._host, self._port = parse_address(address)
        self._num_hosts = num_hosts
        self._identity = identity
        self._plans: dict[int, socket.socket] = {}
        self._tokens: dict[int, str] = {}
        self._beats: dict[int, socket.socket] = {}

    def wait(self, arrived: Arrived) -> dict[int, Connections]:
        """Waits for all followers; returns the connections to each, by rank.

        Raises:
            ConfigError: The leader cannot listen at the address, or a host does not come in time.
        """
        deadline = time.monotonic() + PATIENCE_S
        with _listen(self._host, self._port) as listener:
            with _listen(self._host, self._port + 1):  # JAX's coordinator listens there later, and would fail silently
                pass
            listener.settimeout(RETRY_S)
            while len(self._beats) < self._num_hosts - 1:
                if time.monotonic() > deadline:
                    raise ConfigError(self._who_is_missing())
                self._forget_those_that_left()
                self._give_signs_of_life()
                arrived(1 + len(self._beats), self._num_hosts)
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    self._greet(connection)
        arrived(self._num_hosts, self._num_hosts)
        return {rank: Connections(plan.getsockname()[0], plan, self._beats[rank]) for rank, plan in self._plans.items()}

    def _greet(self, connection: socket.socket) -> None:
        """Accepts a caller, or tells it why not."""
        try:
            why = self._take(connection, receive_message(connection, HELLO_S))
            if why is None:
                _prepare(connection)
                return
            logger.warning("a host that called was refused: %.200r", why)
            send_message(connection, {"refused": why})
        except (OSError, ValueError) as error:  # a stranger may send anything
            logger.warning("a caller was no host of this engine: %.200r", error)
        connection.close()

    def _take(self, connection: socket.socket, hello: dict[str, Any]) -> str | None:
        """Accepts a caller and returns None, or returns why it is refused."""
        rank, token, identity = hello.get("rank"), hello.get("token"), hello.get("identity")
        if not isinstance(rank, int) or not 1 <= rank < self._num_hosts:
            return (
                f"--node-rank must be in [1, {self._num_hosts - 1}] on a host that is not the leader, but is {rank!r}"
            )
        if isinstance(token, str):
            if rank not in self._tokens or not secrets.compare_digest(token.encode(), self._tokens[rank].encode()):
                return "it does not know what this host was told"
            self._beats[rank] = connection
            send_message(connection, {"welcome": ""})
            return None
        if rank in self._plans:
            return f"a host with --node-rank {rank} is there already; give every host a rank of its own"
        if not isinstance(identity, dict):
            return "a host must say what it is, but did not"
        if (why := difference(self._identity, identity)) is not None:
            return why
        self._plans[rank], self._tokens[rank] = connection, secrets.token_hex(TOKEN_BYTES)
        send_message(connection, {"welcome": self._tokens[rank]})
        return None

    def _forget_those_that_left(self) -> None:
        """Forgets hosts that have ended while others were awaited, so that they can be started again."""
        for rank, connection in list(self._plans.items()):
            if _has_ended(connection):
                for connections in (self._plans, self._beats):
                    if rank in connections:
                        connections.pop(rank).close()
                del self._tokens[rank]

    def _give_signs_of_life(self) -> None:
        """Sends beats to the hosts that are there, because they watch this host already."""
        for connection in self._beats.values():
            with contextlib.suppress(OSError):
                connection.send(FIRST_BEAT)

    def _who_is_missing(self) -> str:
        missing = [str(rank) for rank in range(1, self._num_hosts) if rank not in self._beats]
        return (
            f"every host must be there within {PATIENCE_S:g} s, but --node-rank {', '.join(missing)} did not call at "
            "--dist-init-addr; start it, or look whether it reaches that address"
        )


def join(address: str, rank: int, identity: Mapping[str, str]) -> Connections:
    """The follower's side: calls `address` until the leader answers.

    Raises:
        ConfigError: The leader refuses this host, or does not answer in time.
    """
    host, port = parse_address(address)
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _join(host, port, rank, identity)
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"the leader must be there within {PATIENCE_S:g} s, but --dist-init-addr {address} gave: {error}; "
                    "start the host with --node-rank 0, or correct the address"
                ) from None
            time.sleep(RETRY_S)


def _join(host: str, port: int, rank: int, identity: Mapping[str, str]) -> Connections:
    with contextlib.ExitStack() as opened:
        plan = opened.enter_context(socket.create_connection((host, port), ANSWER_S))
        token = _ask(plan, {"rank": rank, "identity": dict(identity)})
        beats = opened.enter_context(socket.create_connection((host, port), ANSWER_S))
        _ask(beats, {"rank": rank, "token": token})
        opened.pop_all()
    for connection in (plan, beats):
        _prepare(connection)
    return Connections(plan.getsockname()[0], plan, beats)


def _ask(connection: socket.socket, hello: dict[str, Any]) -> str:
    """Says hello to the leader; returns the text of its welcome."""
    send_message(connection, hello)
    answer = receive_message(connection)
    if "refused" in answer:
        raise ConfigError(f"the leader refuses this host: {answer['refused']}")
    if not isinstance(token := answer.get("welcome"), str):
        raise WireError("what answers is no leader of jsg")
    return token


@contextlib.contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address, family=family)
    except OSError as error:
        raise ConfigError(
            "--dist-init-addr must be an address of the leader that is free, and so must be the port behind it, but "
            f"{host} with {port} gave: {error.strerror}; name another, or end what uses it"
        ) from None
    with listener:
        yield listener


def _prepare(connection: socket.socket) -> None:
    """Sends small messages at once, and waits without a limit, because the watch ends the process if need be."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # an idle engine makes no calls for days
    if hasattr(socket, "TCP_KEEPIDLE"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)


def _has_ended(connection: socket.socket) -> bool:
    """Whether the other side has closed the connection, even if there is unread data."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))
