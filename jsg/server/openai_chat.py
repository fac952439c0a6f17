"""`/v1/chat/completions`."""

import asyncio
import functools
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.answer import Answer, Prompt
from jsg.processing.tokenizer import Tokenizer
from jsg.server.body import Body, Checked
from jsg.server.event_stream import Event, respond_with_events, until_disconnect
from jsg.server.failures import json_response
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_SCORES, new_rid
from jsg.server.openai_common import NOT_YET_ANYWHERE, OpenAIBody, finish_reason, now, token_text, usage
from jsg.types import MAX_TOP_LOGPROBS, TokenLogprob

router = APIRouter()


class TextPart(Body):
    """A part of a content; this version takes text only."""

    type: Literal["text"]
    text: str


class Message(Body):
    """One turn."""

    NOT_YET: ClassVar[frozenset[str]] = frozenset({"tool_calls", "tool_call_id", "function_call", "audio", "refusal"})

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Checked[TextPart]
    name: str | None = None

    def to_template(self) -> dict[str, str]:
        """As chat templates know it: the parts joined, `developer` under its older name `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(OpenAIBody):
    """What `/v1/chat/completions` takes."""

    NOT_YET: ClassVar[frozenset[str]] = NOT_YET_ANYWHERE | {
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
        *("modalities", "audio", "prediction", "reasoning_effort", "verbosity", "web_search_options"),
        *("service_tier", "store", "safety_identifier", "prompt_cache_key", "chat_template_kwargs"),
    }

    messages: Annotated[Checked[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31)
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true; set it, or leave this out", "top_logprobs")
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise RequestError("max_tokens is the old name of max_completion_tokens; give only one", "max_tokens")
        return self


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, front: ReadyFront) -> Response:
    """Answers a conversation; `n` times with `n`, as events with `stream`."""
    front.check_model(body.model)
    prompt = await _prompt(body, front)
    answers = front.generator.answers([prompt])
    head = {"id": prompt.rid, "created": now(), "model": front.model_name}
    if body.stream:
        return await respond_with_events(request, _events(body, front, answers, head))
    await until_disconnect(request, front.generator.complete(answers))
    choices = [_choice(index, answer, front.generator.tokenizer) for index, answer in enumerate(answers)]
    return json_response(
        {**head, "object": "chat.completion", "choices": choices, "usage": usage(answers, body.num_answers)}
    )


async def _prompt(body: ChatBody, front: Front) -> Prompt:
    messages = [message.to_template() for message in body.messages]
    input_ids = await asyncio.to_thread(front.chat.encode, messages)
    limit = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if limit is None:
        limit = default_limit(body, front.generator.info.max_request_tokens - len(input_ids))
    return Prompt(
        rid=f"chatcmpl-{new_rid()}",
        input_ids=input_ids,
        sampling=body.to_sampling(limit),
        is_continued=False,
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
    )


def default_limit(body: ChatBody, room: int) -> int:
    """Tokens to generate where the client names no number: all that there is room for, and can be scored if asked."""
    if body.logprobs:
        room = min(room, MAX_SCORES // (body.num_answers * (1 + (body.top_logprobs or 0))))
    return max(1, room)


def _choice(index: int, answer: Answer, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": answer.text, "refusal": None},
        "logprobs": _logprobs(answer, answer.logprobs, tokenizer),
        "finish_reason": finish_reason(answer),
    }


async def _events(
    body: ChatBody, front: Front, answers: Sequence[Answer], head: dict[str, Any]
) -> AsyncGenerator[Event]:
    head = {**head, "object": "chat.completion.chunk"} | ({"usage": None} if body.wants_usage_event else {})
    has_begun: set[int] = set()

    def event(index: int, delta: dict[str, Any], logprobs: Any = None, finish: str | None = None) -> Event:
        return {**head, "choices": [{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]}

    async for index, delta in front.generator.run(answers):
        answer = answers[index]
        if index not in has_begun:
            has_begun.add(index)
            yield event(index, {"role": "assistant", "content": "", "refusal": None})
        logprobs = _logprobs(answer, delta.logprobs, front.generator.tokenizer) if delta.logprobs else None
        if delta.text or logprobs:
            yield event(index, {"content": delta.text}, logprobs)
        if delta.finish is not None:
            yield event(index, {}, finish=finish_reason(answer))
    if body.wants_usage_event:
        yield {**head, "choices": [], "usage": usage(answers, body.num_answers)}


def _logprobs(answer: Answer, scored: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any] | None:
    if not answer.request.return_logprob:
        return None

    @functools.cache
    def names(token_id: int) -> dict[str, Any]:
        return {"token": token_text(tokenizer, token_id), "bytes": list(tokenizer.token_bytes(token_id))}

    def entry(token_id: int, logprob: float | None) -> dict[str, Any]:
        return {**names(token_id), "logprob": logprob}

    content = [
        entry(token.token_id, token.logprob) | {"top_logprobs": [entry(*pair) for pair in token.top]}
        for token in scored
    ]
    return {"content": content, "refusal": None}
