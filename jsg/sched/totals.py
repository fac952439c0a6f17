"""The counters of the scheduler."""

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerTotals:
    """Counts since the start. A request is counted when it ends, and its tokens at its first admission."""

    num_retracts: int = 0
    num_aborted: int = 0
    num_expired: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_holds_broken: int = 0
    branch_tokens: int = 0
    branch_tokens_computed: int = 0
