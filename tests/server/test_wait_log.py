"""The line for a request that waited long."""

import dataclasses
import logging
from collections import Counter
from typing import Any

import pytest

from jsg.server.telemetry.exchange import Endpoint, Exchange
from jsg.server.telemetry.wait_log import LONG_S, SECONDS_PER_LINE, WaitLog
from jsg.waits import WaitClock, Waited, WaitReason

ROUTE = "/v1/completions"


@dataclasses.dataclass
class FakeAnswer:
    """What the log reads of an answer."""

    waited: Waited | None = None
    elapsed_s: float = 0.0


def exchange(*answers: FakeAnswer, took_s: float = 100.0) -> Exchange:
    state: dict[str, Any] = {"request_id": "9f1c", "wait_clock": WaitClock(Counter())}
    made = Exchange(Endpoint(ROUTE, generates=True), {"method": "POST", "headers": []}, state)
    made.answers = answers  # pyright: ignore[reportAttributeAccessIssue]
    made.begun_at = made.started_at
    made.ended_at = made.started_at + took_s
    return made


def waited(**seconds: float) -> FakeAnswer:
    return FakeAnswer({WaitReason[name.upper()]: count for name, count in seconds.items()}, elapsed_s=99.0)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return messages


def test_a_request_that_waited_long_says_for_what(caplog: pytest.LogCaptureFixture):
    now = 0.0
    log = WaitLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        log.on_exchange(exchange(waited(rows=LONG_S)))
        log.on_exchange(exchange())
        assert not lines(caplog), "an answer may take long, and have waited for little"
        log.on_exchange(exchange(waited(text=0.5), waited(rows=2.26, pages=10.13)))
        assert lines(caplog) == [f"request 9f1c to {ROUTE} waited for 12.4 s: pages 10.1 s, rows 2.3 s"]


def test_one_that_left_before_its_first_step_is_told_too(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        WaitLog().on_exchange(exchange(FakeAnswer(), took_s=31.0))
        assert lines(caplog) == [f"request 9f1c to {ROUTE} waited for 31.0 s and had no first step"]


def test_many_have_few_lines(caplog: pytest.LogCaptureFixture):
    now = 0.0
    log = WaitLog(lambda: now)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            log.on_exchange(exchange(waited(rows=20.0)))
        now += SECONDS_PER_LINE
        log.on_exchange(exchange(waited(rows=20.0)))
        first, second = lines(caplog)
    assert first.endswith("rows 20.0 s") and second.endswith("rows 20.0 s; 99 others since the last such line")
