"""What the waiting requests wait for, and for how long. No decision depends on it.

    the queue waits for    next_step │ rows ······· │ pages ··· │ rows ····
    a request                     └────────── its seconds ─────────┘

All requests of the queue wait for one thing: for what the request lacks that is next. So a step notes one reason,
however many requests wait, and a request gets the seconds by which the sums have grown between its coming and its
going. Few wait for something of their own: those that the step has looked at and passed, and joined requests.
"""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import final

from jsg.sched.request import RunningRequest
from jsg.waits import Waited, WaitReason


@dataclasses.dataclass(slots=True)
class _Wait:
    """The wait of a request.

    Attributes:
        own: For what it waits by itself; None while it waits for what all wait for.
        since_s: Since when.
        sums: The sums of the queue then.
        waited: Its seconds before.
    """

    own: WaitReason | None
    since_s: float
    sums: Mapping[WaitReason, float]
    waited: defaultdict[WaitReason, float] = dataclasses.field(default_factory=lambda: defaultdict(float))


@final
class Waits:
    """The requests that wait: those in the queue and joined requests without a row, but no branches.

    Invariants: `_own` has the requests that wait for something of their own, which are those in `_joining`, whose
    branches are being computed, and those in `_noted`, by the last step.
    """

    def __init__(self) -> None:
        self._reason = WaitReason.NEXT_STEP
        self._now_s = 0.0
        self._sums: defaultdict[WaitReason, float] = defaultdict(float)
        self._waits: dict[RunningRequest, _Wait] = {}
        self._own: dict[RunningRequest, WaitReason] = {}
        self._joining: set[RunningRequest] = set()
        self._noted: set[RunningRequest] = set()

    def __len__(self) -> int:
        """How many requests wait."""
        return len(self._waits)

    @property
    def counts(self) -> Mapping[WaitReason, int]:
        """How many requests wait for each reason."""
        counts = Counter(self._own.values())
        counts[self._reason] += len(self._waits) - len(self._own)
        return counts

    def advance(self, now_s: float) -> None:
        """Notes the time, which holds for all that is noted until the next call."""
        if now_s > self._now_s:
            self._sums[self._reason] += now_s - self._now_s
            self._now_s = now_s

    def begin(self, running: RunningRequest) -> None:
        """A request waits from now on."""
        self._waits[running] = _Wait(None, self._now_s, self._sums.copy())

    def end(self, running: RunningRequest) -> Waited:
        """A request waits no longer, or never did. Returns for how many seconds it has waited since `begin`."""
        wait = self._waits.pop(running, None)
        if wait is None:
            return {}
        self._joining.discard(running)
        self._own.pop(running, None)
        self._settle(wait)
        return wait.waited

    def join(self, whole: RunningRequest, *, begins: bool) -> None:
        """The branches of a joined request begin to be computed, or all of them are, or are given up."""
        if begins:
            self._joining.add(whole)
        else:
            self._joining.discard(whole)
        self._change(whole, WaitReason.BRANCHES if begins else None)

    def note(self, reason: WaitReason, own: Mapping[RunningRequest, WaitReason]) -> None:
        """A step was planned. Notes for what the queue waits, and for what some wait by themselves, branches too."""
        self._reason = reason
        wholes = {running.whole: why for running, why in own.items()}
        for running in self._noted - wholes.keys():
            self._change(running, WaitReason.BRANCHES if running in self._joining else None)
        for running, why in wholes.items():
            self._change(running, why)
        self._noted = set(wholes)

    def _change(self, running: RunningRequest, own: WaitReason | None) -> None:
        wait = self._waits.get(running)
        if wait is None or wait.own is own:
            return
        self._settle(wait)
        wait.own = own
        if own is None:
            del self._own[running]
        else:
            self._own[running] = own

    def _settle(self, wait: _Wait) -> None:
        """Adds the seconds until now."""
        if wait.own is not None:
            wait.waited[wait.own] += self._now_s - wait.since_s
        else:
            for reason, sum_s in self._sums.items():
                if (seconds := sum_s - wait.sums.get(reason, 0.0)) > 0:
                    wait.waited[reason] += seconds
        wait.since_s, wait.sums = self._now_s, self._sums.copy()
