"""What every API shows of an answer, each in its own place."""

from typing import Any

from jsg.errors import AbortedError
from jsg.processing.answer import Answer
from jsg.processing.tokenizer import Tokenizer
from jsg.types import FinishType


def finish_of(answer: Answer) -> dict[str, Any]:
    """Why the answer ended: `finish_reason`, which is null while it runs, and what it stopped at.

    Raises:
        AbortedError: Somebody ended it. OpenAI's clients know no such reason, and it must not look like an end.
    """
    finish = answer.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    if finish.type is FinishType.ABORT:
        raise AbortedError("the request was aborted before its answer was complete; send it again if you still want it")
    return {"finish_reason": finish.type.value, "matched_stop": finish.matched}


def constraint_of(answer: Answer) -> dict[str, Any]:
    """What the grammar did to the answer, under `constraint`, where that is asked for."""
    return {"constraint": answer.constraint()} if answer.request.sampling.return_constraint else {}


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text; one that is only part of a character is shown by its bytes in hex, as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
