"""`/v1/rerank`: how well documents answer a query, as Qwen3-Reranker judges it.

The model reads the query and a document in a chat turn, and the score is the probability of "yes" against "no" as its
next token. The text around them is that of Qwen3-Reranker, which was trained with it.
"""

import dataclasses
from typing import Annotated

from fastapi import Request
from pydantic import Field
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.parts import Part, TextPart
from jsg.processing.tokenizer import Tokenizer
from jsg.prompt_ids import PromptIds
from jsg.server.caller import CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_ANSWERS, new_rid
from jsg.server.http.body import Body, Checked
from jsg.server.http.event_stream import until_disconnect
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import new_router
from jsg.server.native.score import MAX_JOINED, label_logprobs, label_prompts, to_scores
from jsg.server.shared.fields import END_USER, MAX_NAME_CHARS, MODEL
from jsg.server.shared.judging import TURN_BEGIN, TURN_END, judging_ids
from jsg.server.shared.reading import check_inputs, prompt_usage
from jsg.speech.prompts.encode_parts import encode_parts

INSTRUCT = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    f"{TURN_BEGIN}system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    f'provided. Note that the answer can only be "yes" or "no".{TURN_END}\n{TURN_BEGIN}user\n'
)
BEHIND = f"{TURN_END}\n{TURN_BEGIN}assistant\n<think>\n\n</think>\n\n"

router = new_router()


class RerankDocument(Body):
    """A document as an object."""

    text: str = Field(description="The text of the document.")


class RerankBody(Body):
    """What `/v1/rerank` takes: a query, and documents that may answer it. The fields are those of Jina and Cohere."""

    query: str = Field(description="The text that the documents are judged by.")
    documents: Checked[str] | Checked[RerankDocument] = Field(description="Texts, or objects with a `text`.")
    top_n: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="The number of results. Default: all documents."
    )
    return_documents: bool | None = Field(
        None, description="Whether a result has the text of its document. Default: true."
    )
    max_tokens_per_doc: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        None, description="From Cohere. Each document is cut to this many tokens. Default: a document is never cut."
    )
    instruct: str | None = Field(
        None, description=f"From SGLang. What makes a document a good one. Default: {INSTRUCT!r}."
    )
    model: str | None = Field(None, description=MODEL)
    user: str | None = Field(None, max_length=MAX_NAME_CHARS, description=END_USER)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
@router.post("/rerank")
async def rerank(body: RerankBody, request: Request, call: CurrentCall, front: ReadyFront) -> Response:
    """Sorts documents by the probability that they answer a query, for models that judge as Qwen3-Reranker does."""
    front.check_model(body.model)
    if front.generator.info.embedder is not None:
        raise front.lacks(call.route, "a model that judges (such as Qwen3-Reranker)")
    label_ids = judging_ids(front.generator.tokenizer)
    if label_ids is None:
        raise front.lacks(call.route, f"a model with turns of {TURN_BEGIN} and tokens for yes and no")
    documents = [each if isinstance(each, str) else each.text for each in body.documents]
    id_lists = await _encode(body, documents, front)
    call = dataclasses.replace(call, user=body.user)
    generation = await front.generator.begin(call, label_prompts("rerank", id_lists, label_ids, call))
    await until_disconnect(request, generation.complete())
    scores = [to_scores(label_logprobs(answer), are_shares=True)[0] for answer in generation.answers]
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({} if body.return_documents is False else {"document": {"text": documents[index]}})
        for index in best
    ]
    return json_response(
        {
            "id": f"rerank-{new_rid()}",
            "object": "list",
            "model": front.model_name,
            "results": results,
            "usage": prompt_usage(generation.answers),
        }
    )


async def _encode(body: RerankBody, documents: list[str], front: Front) -> list[tuple[int, ...] | PromptIds]:
    if not 1 <= len(documents) <= MAX_ANSWERS:
        todo = "send several requests" if documents else "send one"
        raise RequestError(
            f"documents must have 1 to {MAX_ANSWERS} items, but has {len(documents)}; {todo}", "documents"
        )
    query = f"<Instruct>: {INSTRUCT if body.instruct is None else body.instruct}\n<Query>: {body.query}\n<Document>: "
    size = len(documents) * len(BEFORE + query + BEHIND) + sum(map(len, documents))
    if size > MAX_JOINED:
        raise RequestError(
            f"query and documents must have at most {MAX_JOINED} characters, the query counted for each document, but "
            f"have {size}; shorten the query or split the documents",
            "documents",
        )
    tokenizer, info = front.generator.tokenizer, front.generator.info

    def parts(document: str) -> list[Part]:
        before = TextPart(BEFORE, is_markup=True, is_template=True)
        return [before, TextPart(query + document), TextPart(BEHIND, is_markup=True)]

    def encode_all() -> list[tuple[int, ...] | PromptIds]:
        limit, most = info.max_request_tokens, body.max_tokens_per_doc
        texts = documents if most is None else [_beginning(tokenizer, each, most) for each in documents]
        return [encode_parts(tokenizer, parts(each), max_tokens=limit).input_ids for each in texts]

    id_lists = await front.generator.beside(encode_all, size)
    check_inputs(id_lists, info, "documents")
    return id_lists


def _beginning(tokenizer: Tokenizer, text: str, most: int) -> str:
    """The characters of a text that its first `most` tokens make whole."""
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    return text if len(ids) <= most else IncrementalDetokenizer(tokenizer, skip_special_tokens=False).push(ids[:most])
