"""Layers with a window: which cached prefixes can still be used, and what is decided by that."""

import numpy as np
import pytest

from jsg.types import Request
from jsg.window import Window
from tests.sched.simulated import EngineShape, SimulatedEngine
from tests.sched.test_scheduler import make_request

WINDOW = Window(4)


def make_engine(num_parts: int, **knobs: object) -> SimulatedEngine:
    """An engine that runs one request after another, and has parts for some of its pages."""
    shape = EngineShape(
        **{"num_pages": 100, "max_running": 1, "windows": (WINDOW,), "part_rate": num_parts / 100} | knobs
    )  # pyright: ignore[reportArgumentType]
    engine = SimulatedEngine(shape)
    (group,) = engine.scheduler.table.windows
    assert group.num_total == num_parts
    return engine


def prompt(rid: str, first: int, length: int, *more: int, **fields: object) -> Request:
    """A prompt that begins like no other with another `first`, and has `length` tokens and then more."""
    tokens = np.random.default_rng(first).integers(2, 7, length - 1)
    return make_request(rid, (first, *tokens.tolist(), *more), **fields)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("waits", [False, True])
def test_what_a_waiting_request_needs_goes_last(waits: bool):
    engine = make_engine(30)
    engine.add(prompt("first", 2, 12, max_new=1))
    engine.run_until_idle()
    later = prompt("later", 2, 12, 3, max_new=1)
    for index in range(4):
        engine.add(prompt(f"other {index}", 3 + index, 12, max_new=1, priority=1))
    if waits:
        engine.add(later)
    engine.run_until_idle()
    if not waits:
        engine.add(later)
    engine.run_until_idle()
    assert engine.answers["later"].cached_tokens == (12 if waits else 0)
    engine.check_answers()
