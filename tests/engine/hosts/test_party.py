"""What a leader tells the hosts that follow it, with real sockets and no device."""

import socket
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import create_autospec

import pytest

from jsg.config import EngineConfig
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import Executables
from jsg.engine.device.replica import Replica
from jsg.engine.hosts.party import Leader, digest
from jsg.engine.hosts.rendezvous import Connections
from jsg.engine.hosts.watch import FIRST_BEAT
from jsg.engine.hosts.wire import CallCodec, WireError, receive_message, send_message

CONFIG = EngineConfig(nnodes=2, tp_size=2, dist_init_addr="a:1")
CALL = ("copy_slots",)


class Led:
    """A leader that serves, and the other ends of its connections, where the test follows."""

    def __init__(self) -> None:
        plan, self.plan = socket.socketpair()
        beats, self.beats = socket.socketpair()
        self.plan.settimeout(60)
        self.leader = Leader(CONFIG, {1: Connections("127.0.0.1", plan, beats)})
        replica = create_autospec(Replica, instance=True, state=())
        replica.call.side_effect = RuntimeError("out of memory")
        executables = create_autospec(Executables, instance=True, num_in_order=1)
        executables.names.return_value, executables.host_shapes.return_value = [CALL], ()
        follower = threading.Thread(target=self._agree, args=(digest({CALL: ()}, replica),))
        follower.start()
        self.leader.open(replica, executables)
        follower.join()

    def _agree(self, value: str) -> None:
        self.beats.sendall(FIRST_BEAT)
        send_message(self.plan, {"value": value, "number": 1})
        assert receive_message(self.plan)["refused"] is None

    def receive(self) -> Any:
        return CallCodec({CALL: ()}).receive(self.plan)


@pytest.fixture
def led(monkeypatch: pytest.MonkeyPatch) -> Iterator[Led]:
    monkeypatch.setattr("jsg.engine.hosts.watch.FIND_OUT_S", 0.2)
    made = Led()
    yield made
    made.plan.close()
    made.beats.close()


def test_an_orderly_end_is_told(led: Led):
    led.leader.close()
    assert led.receive() is None


def test_after_a_failed_step_the_end_is_not_an_orderly_one(led: Led):
    core = create_autospec(EngineCore, instance=True, _runner=led.leader)
    core._step.side_effect = lambda: led.leader.call(CALL)
    with pytest.raises(RuntimeError, match="out of memory"):
        EngineCore.step(core)
    led.leader.close()
    assert led.receive() == (CALL, [])
    with pytest.raises(WireError, match="closed the connection"):
        led.receive()
