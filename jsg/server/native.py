"""`/generate`: SGLang's own interface."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.answer import Answer, Prompt
from jsg.processing.tokenizer import Tokenizer
from jsg.server.body import Body, Checked, Rid, TokenIds, is_prompt_list
from jsg.server.event_stream import Event, respond_with_events, until_disconnect
from jsg.server.failures import json_response
from jsg.server.front import ReadyFront
from jsg.server.generation import Generator, new_rid
from jsg.types import MAX_TOP_LOGPROBS, SamplingParams

Object = dict[str, Any]

router = APIRouter()


class GenerateBody(Body):
    """What `/generate` takes: one prompt or a list, as text or as token ids."""

    text: str | Checked[str] | None = None
    input_ids: TokenIds | Checked[TokenIds] | None = None
    sampling_params: Object | Checked[Object] | None = None
    rid: Rid | Checked[Rid] | None = None
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = Field(-1, ge=-1, lt=2**31)
    top_logprobs_num: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    token_ids_logprob: TokenIds | None = None
    return_text_in_logprobs: bool = False


@router.post("/generate")
async def generate(body: GenerateBody, request: Request, front: ReadyFront) -> Response:
    """Answers one prompt with an object, a list of prompts or `n` > 1 with a list; as events with `stream`.

    An event holds all of its answer so far; what comes faster than the client reads is put into one event. The
    `input_*` logprobs, which never change, are in the first event of an answer that has them and in its last.
    """
    generator = front.generator
    prompts, is_list = await _prompts(body, generator)
    answers = generator.answers(prompts)
    is_list = is_list or len(answers) > 1
    texts = generator.tokenizer if body.return_text_in_logprobs else None
    if body.stream:
        return await respond_with_events(request, _events(generator, answers, is_list, texts))
    await until_disconnect(request, generator.complete(answers))
    results = [answer.result(texts) for answer in answers]
    return json_response(results if is_list else results[0])


async def _events(
    generator: Generator, answers: Sequence[Answer], is_list: bool, texts: Tokenizer | None
) -> AsyncGenerator[Event]:
    has_shown_prompt: set[int] = set()
    async for index, delta in generator.run(answers):
        answer = answers[index]
        is_due = delta.finish is not None or (index not in has_shown_prompt and bool(answer.prompt_logprobs))
        if is_due:
            has_shown_prompt.add(index)
        place = {"index": index} if is_list else {}
        yield answer.result(texts, with_prompt_logprobs=is_due) | place


async def _prompts(body: GenerateBody, generator: Generator) -> tuple[list[Prompt], bool]:
    """The prompts of a body, and whether it has a list of them."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("exactly one of text and input_ids must be given", param="text")
    given: Any = body.text if body.input_ids is None else body.input_ids
    is_list = is_prompt_list(given)
    id_lists = await generator.encode(given if is_list else [given])
    if not id_lists:
        raise RequestError("a list of prompts must have at least one, but it is empty", param="text")
    samplings = _one_each("sampling_params", body.sampling_params, len(id_lists), {})
    rids = _one_each("rid", body.rid, len(id_lists), None)
    if isinstance(body.rid, str) and is_list:
        rids = [f"{body.rid}_{index}" for index in range(len(id_lists))]
    prompts = [
        Prompt(
            rid=rid or new_rid(),
            input_ids=input_ids,
            sampling=SamplingParams.from_dict(sampling),
            return_logprob=body.return_logprob,
            logprob_start_len=body.logprob_start_len,
            top_logprobs_num=body.top_logprobs_num,
            token_ids_logprob=tuple(body.token_ids_logprob or ()),
        )
        for rid, input_ids, sampling in zip(rids, id_lists, samplings, strict=True)
    ]
    return prompts, is_list


def _one_each(name: str, value: Any, count: int, default: Any) -> list[Any]:
    """One value for each of `count` prompts: a list has its own for each, anything else is for all."""
    if not isinstance(value, list):
        return [default if value is None else value] * count
    if len(value) != count:
        raise RequestError(f"{name} must have one item for each of the {count} prompts, but has {len(value)}", name)
    return value
