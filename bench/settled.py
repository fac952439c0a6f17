"""Engines whose figures mean something: a new one compiles most of its programs in the background, beside requests."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jsg


def wait_until_compiled(info: Callable[[], Mapping[str, Any]]) -> None:
    """Returns once nothing is left to compile; `info` is what `EngineCore.stats` or `get_server_info` gives."""
    while info()["num_programs_pending"]:
        time.sleep(0.1)


def compiled_engine(model: str, **knobs: Any) -> jsg.Engine:
    """An engine that compiles nothing any more."""
    engine = jsg.Engine(model, **knobs)
    wait_until_compiled(engine.get_server_info)
    return engine
