"""The interface of what watches generations without changing them: metrics, request log and traces."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol, final

from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt


@final
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Begun:
    """A generation as observers see it.

    Attributes:
        route: The endpoint.
        user: The end user, as the client named it.
        prompts: The prompts that are continued.
        answers: `n` for each prompt in turn; they grow while they are generated.
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
        """The generation was accepted and goes to the engine."""
        ...

    def on_delta(self, begun: Begun, answer: Answer, delta: AnswerDelta) -> None:
        """The engine gave a delta of one answer; the answer holds it already."""
        ...

    def on_end(self, begun: Begun, error: BaseException | None) -> None:
        """The generation has ended. An answer without a finish was cut short.

        `error` is None when every answer finished. Otherwise it ended the generation; a cancellation means that the
        client left.
        """
        ...
