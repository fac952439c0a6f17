"""What a leader tells the hosts that follow it, with real sockets in one process."""

import pathlib
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest

from jsg.config import EngineConfig
from jsg.engine import startup
from jsg.engine.core import EngineCore
from jsg.engine.device.devices import Device
from jsg.engine.device.executables import Executables
from jsg.engine.device.replica import Replica
from jsg.engine.hosts import party
from jsg.engine.hosts.party import Follower, Leader, digest
from jsg.engine.hosts.rendezvous import Connections
from jsg.engine.hosts.watch import FIRST_BEAT
from jsg.engine.hosts.wire import CallCodec, WireError, receive_message, send_message
from tests.engine import small
from tests.engine.late import late_programs

CONFIG = EngineConfig(nnodes=2, tp_size=2, dist_init_addr="a:1")
CALL = ("copy_slots",)
LIMIT_S = 60.0


class Led:
    """A leader that serves, and the other ends of its connections, where the test follows."""

    def __init__(self) -> None:
        plan, self.plan = socket.socketpair()
        beats, self.beats = socket.socketpair()
        self.plan.settimeout(LIMIT_S)
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


def test_a_host_that_follows_comes_to_the_same_state(
    small_model: pathlib.Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch
):
    """Both start in this process, the follower in a thread, where it is told what to call and nothing else."""
    monkeypatch.setattr("jsg.engine.hosts.party.end_process", create_autospec(party.end_process))
    # It waits for both, as the shutdown of JAX does: else the follower may still watch a connection that is closed.
    monkeypatch.setattr("jsg.engine.hosts.party.disconnect", threading.Barrier(2).wait)
    plans, beats = socket.socketpair(), socket.socketpair()
    for plan in plans:
        plan.settimeout(LIMIT_S)
    parties = {
        threading.current_thread(): Leader(CONFIG, {1: Connections("127.0.0.1", plans[0], beats[0])}),
        (thread := threading.Thread(daemon=True)): Follower(CONFIG, Connections("127.0.0.1", plans[1], beats[1])),
    }
    settle = startup.settle
    ended: list[Replica] = []

    def settle_together(config: EngineConfig, directory: pathlib.Path, device: Device, _: None) -> Any:
        return settle(config, directory, device, parties[threading.current_thread()])

    monkeypatch.setattr(startup, "settle", settle_together)
    monkeypatch.setattr(Replica, "close", lambda replica: ended.append(replica))  # the states are looked at below
    config = small.make_config(small_model, compile_cache_dir, **small.DETERMINISTIC)
    with late_programs():
        thread.run = lambda: startup.follow(config, lambda _: None)
        thread.start()
        core = EngineCore(config)
        outcomes = small.run(core, small.traffic(0, count=6))
        core.close()
        thread.join(LIMIT_S)
    assert len(ended) == 2, "the follower has not ended, or there is only one engine"
    assert any(outcome.token_ids for outcome in outcomes.values())
    for mine, theirs in zip(*(jax.tree.leaves(replica.state) for replica in ended), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    party.end_process.assert_not_called()  # pyright: ignore[reportFunctionMemberAccess]


def test_an_orderly_end_is_told(led: Led):
    led.leader.close()
    assert led.receive() is None


def test_after_a_failed_step_the_end_is_not_an_orderly_one(led: Led):
    core = create_autospec(EngineCore, instance=True, _runner=SimpleNamespace(calls=led.leader))
    core._step.side_effect = lambda: led.leader.call(CALL)
    with pytest.raises(RuntimeError, match="out of memory"):
        EngineCore.step(core)
    led.leader.close()
    assert led.receive() == (CALL, [])
    with pytest.raises(WireError, match="closed the connection"):
        led.receive()
