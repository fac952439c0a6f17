"""What each host of an engine does with the others: the leader sends calls, and the followers make them."""

import contextlib
import hashlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, final

import jax
import numpy as np

from jsg.config import EngineConfig
from jsg.engine.device.executables import Executables
from jsg.engine.device.replica import Replica
from jsg.engine.hosts.distributed import connect, disconnect
from jsg.engine.hosts.identity import identity
from jsg.engine.hosts.rendezvous import Arrived, Connections, Gathering, join
from jsg.engine.hosts.watch import Standing, Watch, end_process
from jsg.engine.hosts.wire import CallCodec, receive_message, send_message
from jsg.errors import ConfigError

Schema = dict[Hashable, Sequence[Any]]


@final
class Leader:
    """The host that schedules. It sends calls to the replicas of all hosts."""

    def __init__(self, config: EngineConfig, others: dict[int, Connections]):
        self._plans = {f"host {rank}": others[rank].plan for rank in sorted(others)}
        self._standing = Standing()
        beats = {f"host {rank}": others[rank].beats for rank in sorted(others)}
        self._watch = Watch(beats, self._standing, config.dist_timeout, judges_steps=True)
        self._replica: Replica | None = None
        self._codec = CallCodec({})
        self._is_ready: Callable[[Hashable], bool] = bool
        self._has_failed = False

    def agree(self, topic: str, value: str, number: int = 0) -> int:
        """See `Follower.agree`."""
        answers = {name: _receive(plan) for name, plan in self._plans.items()}
        wrong = next((f"{name} has {said['value']}" for name, said in answers.items() if said["value"] != value), None)
        number = min(number, *(said["number"] for said in answers.values()))
        refusal = None if wrong is None else f"{topic} must be the same on every host, but {wrong}, the leader {value}"
        for plan in self._plans.values():
            send_message(plan, {"refused": refusal, "number": number})
        if refusal is not None:
            raise ConfigError(refusal)
        return number

    def open(self, replica: Replica, executables: Executables) -> None:
        """Begins to send calls to the followers, which must be ready for them too."""
        schema = schema_of(executables)
        self._standing.count_programs = lambda: executables.num_in_order
        at_least = self.agree("programs and pool", digest(schema, replica), executables.num_in_order)
        executables.share(lambda: max(at_least, self._watch.num_programs))
        self._codec = CallCodec(schema)
        self._is_ready = executables.is_ready
        self._replica = replica

    def call(self, name: Hashable, *arrays: np.ndarray) -> Any:
        """As `Replica.call`. The followers get the call first, so that they work while this host starts its part.

        The first runs of a program may take long here.
        """
        assert self._replica is not None, "calls come after open()"
        with self._standing.calling():
            self._codec.send(list(self._plans.values()), name, arrays)
        with self._standing.calling() if self._is_ready(name) else contextlib.nullcontext():
            result = self._replica.call(name, *arrays)
        if is_step(name):
            self._standing.begin(result.tokens)
        return result

    def find_out(self) -> None:
        """See `Calls.find_out`."""
        self._watch.find_out()
        self._has_failed = True

    def close(self) -> None:
        """Frees the replica and ends the followers. After a failure they end as if they had lost their leader."""
        self._watch.stop()
        if self._replica is not None:
            if not self._has_failed:
                self._codec.send_end(list(self._plans.values()))
            self._replica.close()
            if not self._has_failed:
                disconnect()
        self._watch.close()
        for plan in self._plans.values():
            plan.close()


@final
class Follower:
    """A host that makes the calls that the leader sends."""

    def __init__(self, config: EngineConfig, leader: Connections):
        self._plan = leader.plan
        self._standing = Standing()
        self._watch = Watch({"the leader": leader.beats}, self._standing, config.dist_timeout, judges_steps=False)

    def agree(self, topic: str, value: str, number: int = 0) -> int:
        """Waits until every host has called this; returns the least `number` of all hosts.

        Args:
            topic: The name of the value, for the error.
            value: A text that must be the same on all hosts.
            number: A number that may differ.

        Raises:
            ConfigError: The value differs. It is raised on every host.
        """
        send_message(self._plan, {"value": value, "number": number})
        answer = _receive(self._plan)
        if answer["refused"] is not None:
            raise ConfigError(answer["refused"])
        return answer["number"]

    def follow(self, replica: Replica, executables: Executables) -> None:
        """Makes the leader's calls until their end. Ends the process if the leader is lost."""
        schema = schema_of(executables)
        self._standing.count_programs = lambda: executables.num_in_order
        self.agree("programs and pool", digest(schema, replica), executables.num_in_order)
        codec = CallCodec(schema)
        try:
            while (call := codec.receive(self._plan)) is not None:
                name, arrays = call
                result = replica.call(name, *arrays)
                if is_step(name):
                    self._standing.begin(result.tokens)
        except OSError as error:
            end_process(f"the leader is gone: {error}")
        except Exception:  # most often another host took no part in a sum
            self._watch.find_out()
            raise
        self._watch.stop()
        disconnect()
        self._watch.close()
        self._plan.close()


Party = Leader | Follower


def meet(config: EngineConfig, directory: Path, arrived: Arrived) -> Party:
    """Waits for the other hosts and starts JAX together with them. The leader calls `arrived` while it waits.

    Raises:
        ConfigError: The hosts do not fit together, or are not all there in time.
    """
    address, own = config.dist_init_addr, identity(config, directory)
    assert address is not None, "EngineConfig wants an address where there are several hosts"
    if config.node_rank == 0:
        others = Gathering(address, config.nnodes, own).wait(arrived)
        party: Party = Leader(config, others)
        own_address = others[1].own_address
    else:
        leader = join(address, config.node_rank, own)
        party, own_address = Follower(config, leader), leader.own_address
    party.agree("hosts", "")  # waits for all, because JAX waits for a limited time only
    rank, timeout_s = config.node_rank, config.dist_timeout
    connect(address, num_hosts=config.nnodes, rank=rank, own_address=own_address, timeout_s=timeout_s)
    return party


def schema_of(executables: Executables) -> Schema:
    """The arguments from the host of every program."""
    return {name: executables.host_shapes(name) for name in executables.names()}


def digest(schema: Schema, replica: Replica) -> str:
    """A digest of all programs and their arguments, in order, and of the shapes of the state."""
    text = repr([(name, [(each.shape, str(each.dtype)) for each in shapes]) for name, shapes in schema.items()])
    text += repr([array.shape for array in jax.tree.leaves(replica.state)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_step(name: Hashable) -> bool:
    """Whether a call of this program is the last of a step."""
    return isinstance(name, tuple) and name[0] == "sample"


def _receive(connection: Any) -> dict[str, Any]:
    """The next message. Ends the process if the other host is gone, as the watch is about to do."""
    try:
        return receive_message(connection)
    except OSError as error:
        end_process(f"another host is gone: {error}")
        raise
