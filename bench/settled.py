"""Waits until an engine is fully compiled. A new engine compiles in the background, which would distort figures."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jsg


def wait_until_compiled(info: Callable[[], Mapping[str, Any]]) -> None:
    """Returns when nothing is left to compile. `info` gives the result of `EngineCore.stats` or `get_server_info`."""
    while info()["num_programs_pending"]:
        time.sleep(0.1)


def compiled_engine(model: str, **knobs: Any) -> jsg.Engine:
    """An engine with nothing left to compile."""
    engine = jsg.Engine(model, **knobs)
    wait_until_compiled(engine.get_server_info)
    return engine
