import socket

import pytest

from jsg.config import EngineConfig
from jsg.engine.hosts.address import interface_of, parse_address
from jsg.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("10.0.0.1:20000", "10.0.0.1", 20000), ("node-0:1", "node-0", 1), ("[fd00::1]:65534", "fd00::1", 65534)],
)
def test_host_and_port(text: str, host: str, port: int):
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "10.0.0.1", ":20000", "a:b", "a:0", "a:65535", "a:-1", "a:٣", "a:99999999"])
def test_what_is_no_address_is_refused(text: str):
    with pytest.raises(ConfigError, match="--dist-init-addr must be HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "*"])
def test_all_interfaces_are_refused(host: str):
    with pytest.raises(ConfigError, match="nothing listens on any other"):
        parse_address(f"{host}:20000")


def test_the_interface_of_an_address():
    loopback = interface_of("127.0.0.1")
    assert loopback in {name for _, name in socket.if_nameindex()}
    assert interface_of("192.0.2.1") is None  # of documentation, RFC 5737


@pytest.mark.parametrize(
    ("knobs", "what"),
    [
        ({"nnodes": 2, "tp_size": 2}, "--dist-init-addr"),
        ({"nnodes": 2, "tp_size": 3, "dist_init_addr": "a:1"}, "--tp-size counts the devices of all hosts"),
        ({"nnodes": 2, "tp_size": 2, "node_rank": 2, "dist_init_addr": "a:1"}, r"--node-rank must be in \[0, 1\]"),
        ({"dist_init_addr": "a:1"}, "--dist-init-addr is for several hosts"),
        ({"nnodes": 0}, "--nnodes must be in"),
        ({"dist_timeout": 0.1}, "--dist-timeout must be in"),
    ],
)
def test_knobs_that_do_not_fit_together(knobs: dict, what: str):
    with pytest.raises(ConfigError, match=what):
        EngineConfig(**knobs)


def test_an_engine_in_a_process_of_the_user_has_one_host():
    from jsg import Engine

    with pytest.raises(ConfigError, match="several hosts share a model under 'jsg serve' only"):
        Engine("tiny", nnodes=2, tp_size=2, dist_init_addr="127.0.0.1:1")
