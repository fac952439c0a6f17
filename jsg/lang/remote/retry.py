"""The waits before a call that failed is made again."""

import dataclasses
import email.utils
import math
import random
import time
from collections.abc import Mapping
from typing import final

from jsg.errors import ConfigError
from jsg.lang.remote.wire import Failure

PASSING_STATUSES = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529})
"""The statuses after which the same call may succeed later."""
LONGEST_WAIT_S = 60.0
"""A call fails where the API asks to wait longer, because the owner of the program must decide."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The number of retries, and the waits before them.

    Attributes:
        max_retries: Further attempts of one call; 0 makes one attempt only.
        first_wait_s: Seconds before the first retry, doubled for each further one.
        max_wait_s: The longest wait.
        seed: The seed of the jitter, which is up to half of each wait; None draws one.
    """

    max_retries: int = 3
    first_wait_s: float = 0.5
    max_wait_s: float = 20.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError."""
        if self.max_retries < 0 or not 0 <= self.first_wait_s <= self.max_wait_s < math.inf:
            raise ConfigError(
                "max_retries must be at least 0 and 0 <= first_wait_s <= max_wait_s, but got "
                f"{self.max_retries}, {self.first_wait_s} and {self.max_wait_s}; give such numbers"
            )


@final
class Backoff:
    """The waits of one backend."""

    def __init__(self, policy: RetryPolicy):
        self._policy = policy
        self._random = random.Random(policy.seed)

    def wait_s(self, failure: Failure, num_failed: int) -> float | None:
        """Gives the seconds until the next attempt after `num_failed` attempts; None gives up."""
        policy = self._policy
        if not failure.is_passing or num_failed > policy.max_retries:
            return None
        asked = failure.retry_after_s or 0.0
        if asked > LONGEST_WAIT_S:
            return None
        wait = min(policy.max_wait_s, policy.first_wait_s * 2.0 ** min(num_failed - 1, 60))
        return max(asked, wait * (1 - self._random.random() / 2))


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Gives the seconds that `retry-after-ms` or `Retry-After`, as seconds or a date, ask to wait."""
    for name, unit_s in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            wait = float(headers.get(name, "")) * unit_s
        except ValueError:
            continue
        return wait if math.isfinite(wait) and wait >= 0 else None
    until_s = _seconds_of(headers.get("retry-after", ""))
    if until_s is None:
        return None
    now_s = _seconds_of(headers.get("date", ""))  # the clock of the server may differ from that of this machine
    return max(until_s - (time.time() if now_s is None else now_s), 0.0)


def _seconds_of(date: str) -> float | None:
    """Gives the seconds since the epoch of a date in a header; None where it is none."""
    parsed = email.utils.parsedate_tz(date)
    return None if parsed is None else email.utils.mktime_tz(parsed)


def is_passing(status: int, headers: Mapping[str, str]) -> bool:
    """Says whether the same call may succeed later. `x-should-retry` decides where it is given."""
    match headers.get("x-should-retry"):
        case "true":
            return True
        case "false":
            return False
    return status in PASSING_STATUSES
