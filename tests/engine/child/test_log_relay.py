"""What the log process makes of each line."""

import os
import subprocess
import sys

import pytest

from jsg.engine.child import log_relay
from jsg.engine.child.log_relay import Relay, level_of, text_lines
from tests.server.log_lines import LogRecord, read_records

OWN = "\n".join(
    text_lines(0.0, "ERROR", "engine-1", 'it failed\nTraceback (most recent call last):\n  File "a.py"\nKeyError')
)
TRACE = """Exception in thread x:
Traceback (most recent call last):
  File "a.py", line 1, in f
    g()

ValueError: no"""
WARNING = "a.py:12: UserWarning: old\n  f()"
FORMATS = ("text", "json")


def relayed(log_format: str, *texts: str) -> list[LogRecord]:
    relay = Relay(as_json=log_format == "json")
    for line in "\n".join(texts).encode().split(b"\n"):
        relay.add(line)
    relay.end_records()
    return read_records(log_format, relay.output.decode())


@pytest.mark.parametrize("log_format", FORMATS)
class TestRecords:
    def test_our_own(self, log_format: str):
        [record] = relayed(log_format, OWN)
        assert record.message.startswith("it failed\nTraceback (most") and record.message.endswith("KeyError")
        assert record[:3] == ("1970-01-01T00:00:00.000Z", "ERROR", "engine-1")

    def test_others(self, log_format: str):
        records = relayed(log_format, "", "hello", "W0000 00:00:1.0 1 a.cc:2] slow", TRACE, WARNING, "bye")
        assert [record.message for record in records] == [
            "hello",
            "W0000 00:00:1.0 1 a.cc:2] slow",
            TRACE,
            WARNING,
            "bye",
        ]
        assert [record.level for record in records] == ["WARNING", "WARNING", "ERROR", "WARNING", "WARNING"]
        assert {record.source for record in records} == {"other"}

    def test_a_record_in_the_middle_of_a_line(self, log_format: str):
        first, second = relayed(log_format, "half a li" + text_lines(0.0, "INFO", "front", "whole")[0])
        assert (first.source, first.message, second.source, second.message) == ("other", "half a li", "front", "whole")

    def test_a_warning_that_another_engine_repeats(self, log_format: str, monkeypatch: pytest.MonkeyPatch):
        def record(source: str, text: str, level: str = "WARNING") -> str:
            return "\n".join(text_lines(0.0, level, source, text))

        def said(*texts: str) -> list[tuple[str, str]]:
            return [(record.source, record.message) for record in relayed(log_format, *texts)]

        same = [record(f"engine-{number}", "no home\n  as it is") for number in range(3)]
        assert said(*same) == [("engine-0", "no home\n  as it is")]
        assert said(*(record(f"worker-{number}", "no effect") for number in (1, 2))) == [("worker-1", "no effect")]
        assert len(said(same[0], record("engine-1", "no home of mine"), same[0])) == 3, "another one, and its own again"
        assert len(said(record("engine-0", "it failed", "ERROR"), record("engine-1", "it failed", "ERROR"))) == 2
        assert len(said(record("engine", "late"), record("front", "late"))) == 2
        assert said(same[0], same[1], record("engine-1", "b\n  c"))[1:] == [("engine-1", "b\n  c")]
        monkeypatch.setattr(log_relay, "REPEAT_S", 0.0)
        assert len(said(*same)) == 3, "later it is news"
        monkeypatch.setattr(log_relay, "MAX_WARNINGS", 2)
        relay = Relay(as_json=False)
        for number in range(9):
            relay.add(record("engine-0", f"warning {number}").encode())
        assert len(relay._warned) == 2

    def test_no_line_can_be_forged(self, log_format: str):
        forged = "a\u2028b\x1b[31m\x85c\x0bd"
        records = relayed(log_format, *text_lines(0.0, "INFO", "front", forged), forged)
        assert len(records) == 2


def test_levels():
    for line, level in {
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR": "WARNING",
        "I0000 00:00:1700000000.1 42 cpu_feature_guard.cc:210] This binary has errors": "INFO",
        "2026-11-29 08:35:37.123456: E external/xla/a.cc:12] no": "ERROR",
        "E1129 08:35:37.1 42 a.cc:1] no": "ERROR",
        "Fatal Python error: Segmentation fault": "CRITICAL",
        "thread '<unnamed>' panicked at src/lib.rs:1:2:": "ERROR",
        "[h264 @ 0x5] error while decoding MB": "ERROR",
        "terminate called after throwing an instance of 'std::bad_alloc'": "ERROR",
        "INFO:root:hello": "INFO",
        "I am here": "WARNING",
    }.items():
        assert level_of(line) == level, line


@pytest.mark.parametrize("log_format", FORMATS)
def test_the_process(log_format: str):
    """It reads until nobody can write, says when it has written what came before `END`, and obeys no signal."""
    reading, writing = os.pipe()
    command = [sys.executable, "-I", "-S", log_relay.__file__, log_format]
    with subprocess.Popen(command, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        os.close(reading)
        assert process.stdout is not None and process.stderr is not None
        os.write(writing, OWN.encode() + b"\nraw\n")
        first = process.stderr.readline().decode()
        assert "it failed" in first
        process.terminate()
        os.write(writing, log_relay.END + b"\n")
        assert process.stdout.read() == b""
        os.write(writing, b"x" * 90_000 + b"\nlast words")
        os.close(writing)
        records = read_records(log_format, first + process.stderr.read().decode())
    assert process.returncode == 0
    assert [record.message[:9] for record in records[:2]] == ["it failed", "raw"]
    assert records[-1].message.endswith("last words")
    assert sum(len(record.message) for record in records[2:]) == 90_010
