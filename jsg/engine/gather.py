"""Outputs of requests that nobody reads as they grow, several as one: each message costs the front as much as a step.

A request's first output goes out at once, so that the time to the first token stays what it was, and so does its last.
Those between wait for each other, until one is made 0.1 s after the last that went out. What waits when a client aborts
is lost with the rest of its answer.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import final

from jsg.types import RequestOutput

PERIOD_S = 0.1


@dataclasses.dataclass(slots=True)
class _Gathered:
    """What waits of one request, and until when; no output has gone out before `due_s` is set."""

    outputs: list[RequestOutput] = dataclasses.field(default_factory=list)
    due_s: float = 0.0


@final
class Gatherer:
    """Holds outputs back.

    Invariant: a request is known from `add` until its last output has passed, or it was forgotten.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._known: dict[str, _Gathered] = {}

    def add(self, rid: str) -> None:
        """The outputs of this request may come together."""
        self._known[rid] = _Gathered()

    def forget(self, rid: str) -> None:
        """The request has ended without a last output. An unknown one is ignored."""
        self._known.pop(rid, None)

    def gather(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """What goes out after a step that made these outputs."""
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
        whole = _joined(gathered.outputs)
        gathered.outputs, gathered.due_s = [], now + PERIOD_S
        return whole


def _joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    return outputs[0] if len(outputs) == 1 else RequestOutput.join(outputs)
