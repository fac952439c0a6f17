"""How many of the tokens that running requests may still generate memory is kept for."""

from collections.abc import Iterable

from jsg.sched.request import RunningRequest

START = 0.7
FLOOR = 0.14
DECAY_STEPS = 600
STEPS_AHEAD = 20


class AdmissionEstimate:
    """The fraction of `max_new_tokens` that requests are expected to use.

    Most stop early, so keeping room for all of it would leave the pool half empty; keeping none retracts all the time.
    It sinks step by step while memory lasts, and is set anew from what is known when a request had to be retracted.

    Attributes:
        fraction: That part of it.
        promised_pages: Pages that the requests that run will need, as far as it is known while a step is planned.
    """

    def __init__(self, conservativeness: float):
        self._start = min(START * conservativeness, 1.0)
        self._floor = min(FLOOR * conservativeness, self._start)
        self.fraction = self._start
        self.promised_pages: int | None = None

    def step(self) -> None:
        """One step went by without a retract."""
        self.fraction = max(self._floor, self.fraction - (START - FLOOR) / DECAY_STEPS)

    def on_retract(self, running: Iterable[RunningRequest]) -> None:
        """Memory ran out: expect what the remaining requests have used so far and the next steps."""
        used = total = 0
        for request in running:
            used += request.num_output + STEPS_AHEAD
            total += request.request.sampling.max_new_tokens
        self.fraction = min(1.0, max(self.fraction, used / max(total, 1)))

    def on_idle(self) -> None:
        """Nothing runs: start afresh."""
        self.fraction = self._start
