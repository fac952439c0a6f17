"""What the scheduler counts."""

import dataclasses


@dataclasses.dataclass(slots=True)
class SchedulerTotals:
    """What has happened since the start. Requests are counted when they end, tokens when they are admitted first."""

    num_retracts: int = 0
    num_aborted: int = 0
    num_expired: int = 0
    num_failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    num_holds_broken: int = 0
    branch_tokens: int = 0
    branch_tokens_computed: int = 0
