import random
import socket

import pytest

from jsg import free_ports as module
from jsg.free_ports import free_ports


@pytest.mark.parametrize(
    ("text", "lowest", "highest"),
    [
        ("32768\t60999\n", 15_000, 32_767),
        ("1024 32000", 32_001, 65_535),
        ("1024 65535", 15_000, 65_535),  # nothing is left out, so all are tried
        ("", 15_000, 49_151),
    ],
)
def test_no_outgoing_connection_can_take_a_port(tmp_path, monkeypatch, text, lowest, highest):
    given = tmp_path / "range"
    given.write_text(text)
    monkeypatch.setattr(module, "EPHEMERAL_RANGE", given)
    assert module._not_ephemeral() == (lowest, highest)
    assert lowest <= free_ports(count=3) <= highest - 2


def test_ports_in_a_row_that_are_used_are_passed_over(monkeypatch):
    with socket.socket() as used:
        used.bind(("127.0.0.1", free_ports()))
        taken = used.getsockname()[1]
        tries = iter([taken, taken - 1, taken - 2, taken + 1])
        monkeypatch.setattr(random, "SystemRandom", lambda: type("", (), {"randint": lambda *_: next(tries)}))
        assert free_ports(count=2) in (taken - 2, taken + 1)
        monkeypatch.setattr(random, "SystemRandom", lambda: type("", (), {"randint": lambda *_: taken}))
        with pytest.raises(OSError, match=r"127\.0\.0\.1 has no 1 free ports in a row between \d+ and \d+"):
            free_ports()
