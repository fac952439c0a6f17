"""Counts what the calls of a backend cost, and what speculation saved."""

import dataclasses
from typing import final

from jsg.lang.remote.wire import Bill


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Totals of a backend.

    Attributes:
        calls: Calls that the API answered, or began to answer.
        retries: Attempts that failed and were made again.
        prompt_tokens, completion_tokens, cached_tokens: Tokens as the API counted them.
        unreported_calls: Calls that ended before the API reported all of their tokens.
        saved_calls: Gens that were answered from the text of an earlier call.
        saved_prompt_tokens: The tokens of the prompts that those gens would have needed.
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
    """Counts for one backend. Any thread may read it; only the event loop writes it."""

    def __init__(self) -> None:
        self.usage = Usage()

    def count_call(self, bill: Bill | None, *, is_whole: bool) -> None:
        """Counts a call that ended, with its bill as far as one came."""
        self._add(calls=1, unreported_calls=int(not is_whole), **dataclasses.asdict(bill or Bill()))

    def count_retry(self) -> None:
        """Counts an attempt that failed and is made again."""
        self._add(retries=1)

    def count_saving(self, prompt_tokens: int) -> None:
        """Counts a gen that needed no call of its own, and the tokens that the prompt of this call would have had."""
        self._add(saved_calls=1, saved_prompt_tokens=prompt_tokens)

    def _add(self, **counts: int) -> None:
        now = dataclasses.asdict(self.usage)
        self.usage = Usage(**now | {name: now[name] + count for name, count in counts.items()})


@final
class TokenUsage:
    """The tokens of a backend's calls since the last `reset`, under SGLang's names. Any thread may use it."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._start = meter.usage

    @property
    def prompt_tokens(self) -> int:
        """The tokens of prompts."""
        return self._meter.usage.prompt_tokens - self._start.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        """The tokens of answers."""
        return self._meter.usage.completion_tokens - self._start.completion_tokens

    def reset(self) -> None:
        """Counts from 0 again. `usage()` of the backend goes on."""
        self._start = self._meter.usage

    def __repr__(self) -> str:
        return f"TokenUsage(prompt_tokens={self.prompt_tokens}, completion_tokens={self.completion_tokens})"
