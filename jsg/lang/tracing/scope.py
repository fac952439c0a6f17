"""The trace to which the running code belongs. The interpreter needs to know nothing else about the tracer.

A context variable holds it, so that no thread or task sees the trace of another one.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any, Protocol

from jsg.lang.words.ir import SamplingArgs


class Tracing(Protocol):
    """A trace under way."""

    has_ended: bool
    """Whether it has ended. Tasks and threads that the traced body began may still find it."""

    def call(
        self, program: Any, args: tuple[Any, ...], kwargs: dict[str, Any], defaults: SamplingArgs | None = None
    ) -> Any:
        """Traces a program (an `SglFunction`) that the traced program calls; gives its `TracedState`.

        Args:
            program: The program.
            args: Its positional arguments, without the state.
            kwargs: Its keyword arguments.
            defaults: The defaults that the call gave to its gens; None where it gave none.
        """
        ...


_ACTIVE: contextvars.ContextVar[Tracing | None] = contextvars.ContextVar("jsg_tracing", default=None)


def active() -> Tracing | None:
    """Gives the trace to which the running code belongs, or None."""
    tracing = _ACTIVE.get()
    return None if tracing is None or tracing.has_ended else tracing


@contextlib.contextmanager
def inside(tracing: Tracing) -> Iterator[None]:
    """Makes the code of the block belong to `tracing`, which ends with the block."""
    token = _ACTIVE.set(tracing)
    try:
        yield
    finally:
        tracing.has_ended = True
        _ACTIVE.reset(token)
