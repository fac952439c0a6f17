"""Whether the code that runs is being traced: the one thing that the interpreter has to ask the tracer.

Held in a context variable, so that a trace in one thread or task is not seen by another.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Protocol

from jsg.lang.ir import SamplingArgs


class Tracing(Protocol):
    """A trace under way."""

    has_ended: bool
    """It is under way no more; tasks and threads that the traced body began may still find it."""

    def call(
        self, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], defaults: SamplingArgs | None = None
    ) -> Any:
        """Traces a program (an `SglFunction`) that the traced program calls; gives its symbolic state.

        Args:
            program: The function.
            args: Without the state.
            kwargs: The same.
            defaults: What the call gave for its gens; None where it gave nothing.
        """
        ...


_ACTIVE: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("jsg_tracing", default=None)


def active() -> Tracing | None:
    """The trace that the running code belongs to, or None."""
    tracing = _ACTIVE.get()
    return None if tracing is None or tracing.has_ended else tracing


@contextlib.contextmanager
def inside(tracing: Tracing) -> Iterator[None]:
    """While the running code belongs to `tracing`, which ends with the block."""
    token = _ACTIVE.set(tracing)
    try:
        yield
    finally:
        tracing.has_ended = True
        _ACTIVE.reset(token)
