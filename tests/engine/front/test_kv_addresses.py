"""`--kv-events-endpoint`: the addresses of each engine."""

import pytest

from jsg.config import ServerConfig
from jsg.engine.front.kv_addresses import kv_events_of
from jsg.errors import ConfigError


def test_each_engine_has_ports_of_its_own():
    config = ServerConfig(dp_size=2, kv_events_endpoint="tcp://*:5557", kv_events_topic="t")
    found = [(each.address, each.replay_address, each.topic, each.rank) for each in kv_events_of(config) if each]
    assert found == [("tcp://*:5557", "tcp://*:5559", "t", 0), ("tcp://*:5558", "tcp://*:5560", "t", 1)]


@pytest.mark.parametrize(
    ("given", "address"), [("tcp://:5557", "tcp://127.0.0.1:5557"), ("tcp://[::1]:1", "tcp://[::1]:1")]
)
def test_without_a_host_it_is_loopback(given, address):
    (found,) = kv_events_of(ServerConfig(kv_events_endpoint=given))
    assert found is not None and found.address == address


def test_without_an_endpoint_nothing_is_published():
    assert kv_events_of(ServerConfig(dp_size=3)) == [None] * 3
    with pytest.raises(ConfigError, match="--kv-events-topic needs --kv-events-endpoint"):
        kv_events_of(ServerConfig(kv_events_topic="t"))


@pytest.mark.parametrize(
    "given", ["", "5557", "127.0.0.1:5557", "tcp://a:0", "tcp://a:65535", "ipc://x", "tcp://a:b:1"]
)
def test_what_is_no_address_is_refused(given):
    with pytest.raises(ConfigError, match="--kv-events-endpoint must be tcp://ADDR:PORT"):
        kv_events_of(ServerConfig(kv_events_endpoint=given))
