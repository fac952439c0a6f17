"""What is shown of a conversion."""

import io
import types

from rich.console import Console

from jsg.server import progress
from jsg.server.progress import ByteDisplay

MIB = 2**20


def shown(monkeypatch, *, is_terminal: bool) -> str:
    text = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda **_: Console(file=text, force_terminal=is_terminal, width=100))
    times = iter([0, *[1] * 100])  # all is shown one second after the start
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=times.__next__))
    with ByteDisplay("convert") as display:
        for done in range(0, 101, 5):
            display.show(done * MIB, 100 * MIB)
    return text.getvalue()


def test_a_line_for_each_tenth(monkeypatch):
    lines = shown(monkeypatch, is_terminal=False).splitlines()
    assert len(lines) == 10 and lines[0].startswith("convert: 10 of 100 MiB, 0.01 GB/s")
    assert lines[-1].startswith("convert: 100 of 100 MiB, 0.10 GB/s")


def test_a_bar_on_a_terminal(monkeypatch):
    text = shown(monkeypatch, is_terminal=True)
    assert "100 of 100 MiB, 0.10 GB/s" in text
    assert "━" in text and "convert: " not in text
