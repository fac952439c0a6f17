"""Estimates how much memory running requests will need for the tokens that they may still generate."""

from collections.abc import Iterable

from jsg.sched.request import RunningRequest

START = 0.7
"""The fraction at first, with a conservativeness of 1."""
FLOOR = 0.14
"""The smallest fraction, with a conservativeness of 1."""
DECAY_STEPS = 600
"""The steps in which the fraction sinks from `START` to `FLOOR`."""
STEPS_AHEAD = 20
"""The steps after a retract for which every running request should have memory."""


class AdmissionEstimate:
    """The fraction of `max_new_tokens` that requests are expected to use.

    Most requests stop early. Memory for all their tokens would keep the pool half empty, and no memory for them would
    cause retracts all the time. So the fraction sinks step by step while memory lasts. After a retract it rises to the
    fraction that the running requests have used.

    Attributes:
        fraction: From 0 to 1.
        promised_pages: Pages that the running requests are expected to need. It is kept while a step is planned, and is
            None until it is needed.
    """

    def __init__(self, conservativeness: float):
        self._start = min(START * conservativeness, 1.0)
        self._floor = min(FLOOR * conservativeness, self._start)
        self.fraction = self._start
        self.promised_pages: int | None = None

    def step(self) -> None:
        """Lowers the fraction after a step."""
        self.fraction = max(self._floor, self.fraction - (START - FLOOR) / DECAY_STEPS)

    def on_retract(self, running: Iterable[RunningRequest]) -> None:
        """Raises the fraction to what the remaining requests have used so far, and will use in the next steps."""
        used = total = 0
        for request in running:
            used += request.num_output + STEPS_AHEAD
            total += request.request.sampling.max_new_tokens
        self.fraction = min(1.0, max(self.fraction, used / max(total, 1)))

    def on_idle(self) -> None:
        """Resets the fraction, since nothing runs."""
        self.fraction = self._start
