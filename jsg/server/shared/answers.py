"""The fields of an answer that every API shows."""

from typing import Any

from jsg.errors import AbortedError
from jsg.processing.answer import Answer
from jsg.processing.tokenizer import Tokenizer
from jsg.types import FinishType


def finish_of(answer: Answer) -> dict[str, Any]:
    """`finish_reason`, which is null while the answer grows, and `matched_stop`, at which it stopped.

    Raises:
        AbortedError: The answer was aborted. OpenAI's API has no such reason, and the answer must not look complete.
    """
    finish = answer.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    if finish.type is FinishType.ABORT:
        raise AbortedError("the request was aborted before its answer was complete; send it again if you still want it")
    return {"finish_reason": finish.type.value, "matched_stop": finish.matched}


def constraint_of(answer: Answer) -> dict[str, Any]:
    """The report on the grammar, under `constraint`, where the client asked for it."""
    return {"constraint": answer.constraint()} if answer.request.sampling.return_constraint else {}


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text. A token that is a part of a character is shown by its bytes in hex, as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
