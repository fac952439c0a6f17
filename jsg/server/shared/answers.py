"""The fields of an answer that every API shows."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jsg.errors import AbortedError
from jsg.processing.tokenizer import Tokenizer
from jsg.server.http.json_pieces import JsonLists
from jsg.speech.answers.answer import Answer
from jsg.types import FinishType, Request

NOT_ENDED: dict[str, Any] = {"finish_reason": None, "matched_stop": None}
PIECE_SCORES = 512
"""Log-probabilities that become JSON in one turn: about 1 ms."""


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


def reports_of(answer: Answer) -> dict[str, Any]:
    """What the client asked for: the report on the grammar, under `constraint`, and that on drafts, under `drafts`."""
    sampling = answer.request.sampling
    constraint = {"constraint": answer.constraint()} if sampling.return_constraint else {}
    return constraint | ({"drafts": answer.drafts()} if sampling.return_drafts else {})


def scores_json(
    show: Callable[[int, int], Mapping[str, list[Any]]], num_tokens: int, request: Request
) -> Mapping[str, list[Any] | Iterable[bytes]]:
    """The lists of so many scored tokens, which `show` makes; of many tokens they become JSON in pieces."""
    step = step_of(request)
    return show(0, num_tokens) if num_tokens <= step else JsonLists(show, step).until(num_tokens)


def step_of(request: Request) -> int:
    """How many tokens of an answer, each with its alternatives, become JSON in one turn of the event loop."""
    return max(1, PIECE_SCORES // (1 + request.top_logprobs_num + len(request.token_ids_logprob)))


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token's text. A token that is a part of a character is shown by its bytes in hex, as OpenAI does."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
