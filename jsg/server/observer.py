"""What watches generations without changing them: metrics, and what is written down of a request."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, final

from jsg.processing.answer import Answer, AnswerDelta, Prompt


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A generation as observers see it.

    Attributes:
        route: The endpoint that it was asked of.
        user: The end user whom the client named.
        prompts: What is continued.
        answers: `n` for each prompt in turn; they grow by themselves.
        started_at: `time.monotonic()` when it was accepted.
    """

    route: str
    user: str | None
    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    started_at: float


class Observer(Protocol):
    """Is told of each generation. Must be quick, and must not raise."""

    def on_start(self, begun: Begun) -> None:
        """It was accepted and goes to the engine."""
        ...

    def on_delta(self, begun: Begun, answer: Answer, delta: AnswerDelta) -> None:
        """The engine gave something for one of its answers; the answer holds it already."""
        ...

    def on_end(self, begun: Begun, error: BaseException | None) -> None:
        """All is over: `error` is None when every answer finished, else what ended it (cancelled: the client left).

        An answer without a finish was cut short.
        """
        ...
