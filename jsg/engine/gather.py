"""Joins outputs of requests that nobody reads as they grow, because each output costs the front as much as a step.

The first output of a request goes out at once, so that the time to the first token stays true, and so does the last.
The outputs between them wait until 0.1 s have passed since one went out. Outputs that wait when a client aborts are
lost with the rest of the answer.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import final

from jsg.types import RequestOutput

PERIOD_S = 0.1


@dataclasses.dataclass(slots=True)
class _Gathered:
    """The outputs of one request that wait, and the time until which they do."""

    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    due_s: float = 0.0


@final
class Gatherer:
    """Holds outputs back.

    Invariant: a request is known from `add` until its last output has gone out, or until it is forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._known: dict[str, _Gathered] = {}

    def add(self, rid: str) -> None:
        """Says that the outputs of this request may be joined."""
        self._known[rid] = _Gathered()

    def forget(self, rid: str) -> None:
        """Forgets a request that has ended without a last output. Ignores an unknown one."""
        self._known.pop(rid, None)

    def gather(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """The outputs that go out after a step that made these."""
        if not self._known:
            return outputs
        now = self._clock()
        passed = (self._pass(output, now) for output in outputs)
        return [output for output in passed if output is not None]

    def _pass(self, output: RequestOutput, now: float) -> RequestOutput | None:
        gathered = self._known.get(output.rid)
        if gathered is None:
            return output
        gathered.outputs.append(output)
        if output.finish is not None:
            del self._known[output.rid]
        elif now < gathered.due_s:
            return None
        waiting, gathered.outputs, gathered.due_s = gathered.outputs, [], now + PERIOD_S
        return waiting[0] if len(waiting) == 1 else RequestOutput.join(waiting)
