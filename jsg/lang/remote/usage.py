"""What the calls of a backend cost, and what speculation saved."""

import dataclasses
from typing import final

from jsg.lang.remote.wire import Bill


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Totals of a backend.

    Attributes:
        calls: Calls that the API answered, or began to.
        retries: Attempts that failed and were made again.
        prompt_tokens, completion_tokens, cached_tokens: As the API counted them.
        unreported_calls: Calls that ended before the API said all that they cost; the rest is not in the tokens.
        saved_calls: Gens answered by what an earlier call said beyond its own.
        saved_prompt_tokens: What the prompts of those would have cost.
    """

    calls: int = 0
    retries: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    unreported_calls: int = 0
    saved_calls: int = 0
    saved_prompt_tokens: int = 0


@final
class Meter:
    """Counts. Read from any thread, written on the event loop."""

    def __init__(self) -> None:
        self.usage = Usage()

    def count_call(self, bill: Bill | None, *, is_whole: bool) -> None:
        """A call ended, with its bill as far as one came."""
        now, paid = self.usage, bill or Bill()
        self.usage = dataclasses.replace(
            now,
            calls=now.calls + 1,
            prompt_tokens=now.prompt_tokens + paid.prompt_tokens,
            completion_tokens=now.completion_tokens + paid.completion_tokens,
            cached_tokens=now.cached_tokens + paid.cached_tokens,
            unreported_calls=now.unreported_calls + (not is_whole),
        )

    def count_retry(self) -> None:
        """An attempt failed and is made again."""
        self.usage = dataclasses.replace(self.usage, retries=self.usage.retries + 1)

    def count_saving(self, prompt_tokens: int) -> None:
        """A gen needed no call of its own, whose prompt would have had so many tokens."""
        now = self.usage
        self.usage = dataclasses.replace(
            now, saved_calls=now.saved_calls + 1, saved_prompt_tokens=now.saved_prompt_tokens + prompt_tokens
        )
