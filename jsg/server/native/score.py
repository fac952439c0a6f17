"""`/v1/score`: the probabilities that each of several labels comes next, for many items at once."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from jsg.engine.child.protocol import ModelInfo
from jsg.errors import AbortedError, ContextLengthError, RequestError
from jsg.prompt_ids import PromptIds
from jsg.server.caller import ApiCall, CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_ANSWERS, new_rid
from jsg.server.http.body import Body, Checked, TokenId, TokenIds
from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.shared.fields import MODEL
from jsg.server.shared.reading import prompt_usage
from jsg.speech.answers.answer import Answer, Prompt
from jsg.types import MAX_TOP_LOGPROBS, SamplingParams

MAX_JOINED = 2**23  # a body of some megabytes can ask for gigabytes of queries and items

router = new_router()


class ScoreBody(Body):
    """What `/v1/score` takes: a query and items, all as text or all as token ids."""

    REFUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("text_1", "text_2", "data_1", "data_2", "queries", "documents"),
        "the model generates text and cannot score a pair of texts; send query, items and label_token_ids",
    )

    query: str | TokenIds = Field(description="The text or the token ids before each item.")
    items: str | Checked[str] | Checked[TokenIds] = Field(description="One text, or a list of texts or of token ids.")
    label_token_ids: Annotated[Checked[TokenId], Field(min_length=1, max_length=MAX_TOP_LOGPROBS)] = Field(
        description="The token ids of the labels. Their probabilities to come next are the scores."
    )
    apply_softmax: bool | None = Field(None, description="Divide the scores of each item by their sum.")
    item_first: bool | None = Field(None, description="Put each item before the query. Default: the query is first.")
    model: str | None = Field(None, description=MODEL)


@router.post("/v1/score")
async def score(body: ScoreBody, request: Request, call: CurrentCall, front: ReadyFront) -> Response:
    """Gives, for each item, the probability of each label to be the next token after query and item."""
    front.check_model(body.model)
    generation = await front.generator.begin(call, await _prompts(body, call, front))
    await until_disconnect(request, generation.complete())
    scores = [to_scores(label_logprobs(answer), are_shares=bool(body.apply_softmax)) for answer in generation.answers]
    return json_response(
        {"object": "scoring", "model": front.model_name, "scores": scores, "usage": prompt_usage(generation.answers)}
    )


async def _prompts(body: ScoreBody, call: CurrentCall, front: Front) -> list[Prompt]:
    items: Sequence[str | list[int]] = [body.items] if isinstance(body.items, str) else body.items
    if not 1 <= len(items) <= MAX_ANSWERS:
        todo = "send several requests" if items else "send one"
        raise RequestError(f"items must have 1 to {MAX_ANSWERS} items, but has {len(items)}; {todo}", "items")
    if any(isinstance(item, str) != isinstance(body.query, str) for item in items):
        raise RequestError(
            "query and items must be all texts or all token ids, but they are mixed; send one kind", param="items"
        )

    size = len(items) * len(body.query) + sum(map(len, items))
    if size > MAX_JOINED:
        raise RequestError(
            f"query and items must have at most {MAX_JOINED} characters or tokens, the query counted for each item, "
            f"but have {size}; shorten the query or split the items",
            "items",
        )

    def joined(query: Any, item: Any) -> tuple[Any, Any]:
        return (item, query) if body.item_first else (query, item)

    def join_ids() -> list[PromptIds | tuple[()]]:  # the query is checked once, and its ids are copied as they are
        given: tuple[Any, ...] = (body.query, *items)
        query, *others = map(PromptIds.of_any, given)
        return [PromptIds.joined(*joined(query, item)) for item in others]

    if isinstance(body.query, str):
        id_lists = await front.generator.encode(["".join(joined(body.query, item)) for item in items])
    else:
        id_lists = await front.threads.run(join_ids, len(body.query) + sum(map(len, items)))
    _check_tokens(body, id_lists, front.generator.info)
    return label_prompts("score", id_lists, body.label_token_ids, call)


def label_prompts(
    kind: str, id_lists: Sequence[tuple[int, ...] | PromptIds], label_ids: Sequence[int], call: ApiCall
) -> list[Prompt]:
    """Prompts whose answers report the log-probability of each label to come next; `kind` begins their names."""
    rid, namespace = f"{kind}-{new_rid()}", call.caller.namespace()
    sampling = SamplingParams(max_new_tokens=1, temperature=0)
    return [
        Prompt(
            rid=f"{rid}_{index}",
            input_ids=input_ids,
            sampling=sampling,
            return_logprob=True,
            token_ids_logprob=tuple(label_ids),
            namespace=namespace,
        )
        for index, input_ids in enumerate(id_lists)
    ]


def _check_tokens(body: ScoreBody, id_lists: Sequence[tuple[int, ...] | PromptIds], info: ModelInfo) -> None:
    """Raises RequestError that names query and items, as the engine's errors cannot."""
    highest_label = max(body.label_token_ids)
    if highest_label >= info.vocab_size:
        raise RequestError(
            f"label_token_ids must be below {info.vocab_size}, but got {highest_label}; ask /tokenize for token ids",
            "label_token_ids",
        )
    limit = info.max_prompt_tokens
    for index, ids in enumerate(id_lists):
        if not ids:
            raise RequestError(
                f"query and item together must have at least one token, but with items[{index}] they have none; send "
                "some text",
                "items",
            )
        if len(ids) > limit:
            raise ContextLengthError(
                f"query and item together must have at most {limit} tokens, but with items[{index}] they have "
                f"{len(ids)}; shorten one of them",
                param="items",
            )
    highest = max((ids.highest for ids in id_lists if isinstance(ids, PromptIds)), default=0)
    if highest >= info.vocab_size and not isinstance(body.query, str):
        raise RequestError(f"token ids must be below {info.vocab_size}, but got {highest}; correct it", "items")


def label_logprobs(answer: Answer) -> list[float]:
    """The log-probabilities of the labels. Raises AbortedError if there are none."""
    if not answer.logprobs:
        raise AbortedError("the request was aborted before it had all scores; send it again")
    return [logprob for _, logprob in answer.logprobs[0].chosen]


def to_scores(logprobs: Sequence[float], *, are_shares: bool) -> list[float]:
    """The probabilities of labels. With `are_shares` they are divided by their sum, however small it is."""
    best = max(logprobs) if are_shares else 0.0
    if best == -math.inf:
        return [0.0] * len(logprobs)
    weights = [math.exp(logprob - best) for logprob in logprobs]
    total = sum(weights) if are_shares else 1.0
    return [weight / total for weight in weights]
