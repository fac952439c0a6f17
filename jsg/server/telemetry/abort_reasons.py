"""The reasons for which answers end unfinished, as metrics, the request log and traces name them."""

import asyncio
from collections.abc import Iterable

from starlette.requests import ClientDisconnect

from jsg.errors import (
    AbortedError,
    EngineDeadError,
    FirstTokenTimeoutError,
    QueueFullError,
    QueueTimeoutError,
    RequestError,
    ShuttingDownError,
    TimeLimitError,
)
from jsg.speech.answers.answer import Answer
from jsg.types import FinishType

CLIENT_DISCONNECT = "client_disconnect"
ABORT_REQUEST = "abort_request"
ERROR = "error"
REFUSED = "refused"
_ABORT_REASONS: dict[type[BaseException], str] = {
    # The first that fits counts.
    asyncio.CancelledError: CLIENT_DISCONNECT,
    ClientDisconnect: CLIENT_DISCONNECT,
    GeneratorExit: CLIENT_DISCONNECT,
    FirstTokenTimeoutError: "first_token_timeout",
    TimeLimitError: "request_timeout",
    QueueTimeoutError: "queue_timeout",
    QueueFullError: "queue_full",
    RequestError: REFUSED,
    ShuttingDownError: "shutdown",
    EngineDeadError: "engine_dead",
    AbortedError: ABORT_REQUEST,
    BaseException: ERROR,
}
ABORT_REASONS = tuple(dict.fromkeys(_ABORT_REASONS.values()))
"""The reasons for which an answer can end unfinished."""


def end_reason(answers: Iterable[Answer], error: BaseException | None) -> str | None:
    """Why a generation did not come to its end, one of `ABORT_REASONS`; None where it did.

    Args:
        answers: The answers of the generation.
        error: The error that ended it, as `Observer.on_end` gets it.
    """
    is_aborted = any(answer.finish is not None and answer.finish.type is FinishType.ABORT for answer in answers)
    if is_aborted and (error is None or isinstance(error, GeneratorExit)):
        return ABORT_REQUEST  # some endpoints give up as soon as one answer was aborted
    if error is None:
        return None
    return next(reason for kind, reason in _ABORT_REASONS.items() if isinstance(error, kind))
