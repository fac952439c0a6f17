"""Where each engine of a server publishes the events of its radix tree."""

import re
from typing import Any

from jsg.config import ServerConfig
from jsg.engine.child.protocol import KvEvents
from jsg.errors import ConfigError

_ADDRESS = re.compile(r"tcp://(?P<host>[^:/\[\]]*|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")
LOOPBACK = "127.0.0.1"
EVERY = ("*", "0.0.0.0", "[::]")
"""The hosts that mean every address of the machine."""


def kv_events_of(config: ServerConfig) -> list[KvEvents | None]:
    """What each engine of `--dp-size` publishes to: engine N at the port + N, and past events dp_size ports higher.

    Raises:
        ConfigError: `--kv-events-endpoint` is no address, or has too few ports behind it; or there is only a topic.
    """
    size, endpoint = config.dp_size, config.kv_events_endpoint
    if endpoint is None:
        if config.kv_events_topic:
            raise ConfigError("--kv-events-topic needs --kv-events-endpoint, but it is missing; give one")
        return [None] * size
    found = _ADDRESS.fullmatch(endpoint)
    port = int(found["port"]) if found else 0
    if found is None or not 1 <= port <= 65536 - 2 * size:
        raise ConfigError(
            f"--kv-events-endpoint must be tcp://ADDR:PORT with a port in [1, {65536 - 2 * size}], but got "
            f"{endpoint!r}; give one, such as tcp://{LOOPBACK}:5557"
        )
    host = found["host"] or LOOPBACK
    return [
        KvEvents(
            address=f"tcp://{host}:{port + rank}",
            replay_address=f"tcp://{host}:{port + size + rank}",
            topic=config.kv_events_topic,
            rank=rank,
        )
        for rank in range(size)
    ]


def published_at(config: ServerConfig) -> dict[str, Any] | None:
    """Where routers subscribe, under the names that SGLang's router reads; None where nothing is published.

    The host is None where it is every address, since a client has reached one of them.
    """
    first = kv_events_of(config)[0]
    if first is None:
        return None
    host, _, port = first.address.removeprefix("tcp://").rpartition(":")
    return {
        "publisher": "zmq",
        "endpoint_host": None if host in EVERY else host,
        "endpoint_port_base": int(port),
        "topic": first.topic,
        "dp_size": config.dp_size,
        "replay_port_base": int(first.replay_address.rpartition(":")[2]),
    }
