"""The fields of an answer that every API shows."""

from collections.abc import Mapping
from typing import Any

import msgspec

from jsg.errors import AbortedError
from jsg.processing.answer import Answer
from jsg.processing.tokenizer import Tokenizer
from jsg.types import FinishType

NOT_ENDED: dict[str, Any] = {"finish_reason": None, "matched_stop": None}
PIECE = 512
"""Scored tokens that become JSON in one call, and are freed in one. With 20 alternatives each it takes about 1 ms."""


def finish_of(answer: Answer) -> dict[str, Any]:
    """`finish_reason`, which is null while the answer grows, and `matched_stop`, at which it stopped.

    Raises:
        AbortedError: The answer was aborted. OpenAI's API has no such reason, and the answer must not look complete.
    """
    finish = answer.finish
    if finish is None:
        return NOT_ENDED
    if finish.type is FinishType.ABORT:
        raise AbortedError("the request was aborted before its answer was complete; send it again if you still want it")
    return {"finish_reason": finish.type.value, "matched_stop": finish.matched}


def constraint_of(answer: Answer) -> dict[str, Any]:
    """The report on the grammar, under `constraint`, where the client asked for it."""
    return {"constraint": answer.constraint()} if answer.request.sampling.return_constraint else {}


def scores_len(answer: Answer) -> int:
    """The number of log-probabilities that the answer has now, with those of the prompt and of alternatives."""
    request = answer.request
    each = 1 + request.top_logprobs_num + len(request.token_ids_logprob)
    return (len(answer.prompt_logprobs) + len(answer.logprobs)) * each


def in_pieces(scores: Mapping[str, list[Any] | None]) -> dict[str, msgspec.Raw]:
    """The same with each list as JSON. The lists are empty afterwards.

    All is done in pieces, because threads wait for each call of the encoder, and while many objects are freed at once.
    """
    return {name: msgspec.Raw(_in_pieces(entries)) for name, entries in scores.items()}


def _in_pieces(entries: list[Any] | None) -> bytes:
    if entries is None:
        return b"null"
    made: list[bytes] = []
    while entries:
        made.append(msgspec.json.encode(entries[:PIECE])[1:-1])
        del entries[:PIECE]
    return b"[%b]" % b",".join(made)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text. A token that is a part of a character is shown by its bytes in hex, as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
