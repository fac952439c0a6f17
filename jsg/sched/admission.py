"""For how many of the tokens that running requests may still generate memory is left."""

from collections.abc import Iterable

from jsg.sched.request import RunningRequest

START = 0.7
"""The fraction at first, with a conservativeness of 1."""
FLOOR = 0.14
"""The smallest fraction, with a conservativeness of 1."""
DECAY_STEPS = 600
"""Steps in which the fraction sinks from `START` to `FLOOR`."""
STEPS_AHEAD = 20
"""Steps after a retract for which every running request shall have memory."""


class AdmissionEstimate:
    """The fraction of `max_new_tokens` that requests are expected to use.

    Most requests stop early. To leave memory for all their tokens would keep the pool half empty, and to leave none
    would retract requests all the time. So the fraction sinks step by step while memory lasts, and rises to what the
    running requests have used when one had to be retracted.

    Attributes:
        fraction: From 0 to 1.
        promised_pages: Pages that the running requests are expected to need. It is kept while a step is planned, and
            None until somebody asks for it.
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
        """Memory ran out: expects what the remaining requests have used so far, and the next steps."""
        used = total = 0
        for request in running:
            used += request.num_output + STEPS_AHEAD
            total += request.request.sampling.max_new_tokens
        self.fraction = min(1.0, max(self.fraction, used / max(total, 1)))

    def on_idle(self) -> None:
        """Nothing runs: starts afresh."""
        self.fraction = self._start
