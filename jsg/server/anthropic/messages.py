"""Anthropic's `/v1/messages`."""

import dataclasses
import functools
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request
from starlette.responses import Response

from jsg.processing.answer import Answer, Prompt
from jsg.server.anthropic.body import CLIENT_NAMES, CountTokensBody, MessagesBody
from jsg.server.caller import CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import Generation, new_rid
from jsg.server.http.body import client_names
from jsg.server.http.event_stream import Event, respond_with_events, until_disconnect
from jsg.server.http.failures import json_response
from jsg.server.http.json_body import BodyBytes, new_router
from jsg.server.openai.common import finish_of
from jsg.types import FinishType

router = new_router()


@router.post("/v1/messages")
async def create_message(
    body: MessagesBody, request: Request, num_bytes: BodyBytes, call: CurrentCall, front: ReadyFront
) -> Response:
    """Answers a conversation; as events with `stream`."""
    front.check_model(body.model)
    call = dataclasses.replace(call, user=body.user)
    with client_names(CLIENT_NAMES):
        prompt = Prompt(
            rid=f"msg_{new_rid()}",
            input_ids=await _encode(body, num_bytes, front),
            sampling=body.to_sampling(),
            is_continued=body.is_continued,
            namespace=call.caller.namespace(body.cache_salt, body.extra_key),
            priority=body.priority or 0,
        )
        generation = front.generator.begin(call, [prompt])
    if body.stream:
        return await respond_with_events(request, _events(generation, front.model_name), named=True)
    await until_disconnect(request, generation.complete())
    [answer] = generation.answers
    content = [{"type": "text", "text": answer.text, "citations": None}] if answer.text else []
    return json_response({**_message(answer, front.model_name), "content": content, **_ending(answer)})


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: CountTokensBody, num_bytes: BodyBytes, front: ReadyFront) -> Response:
    """How many tokens the prompt would have."""
    front.check_model(body.model)
    with client_names(CLIENT_NAMES):
        return json_response({"input_tokens": len(await _encode(body, num_bytes, front))})


async def _encode(body: CountTokensBody, num_bytes: int, front: Front) -> tuple[int, ...]:
    encode = functools.partial(front.chat.encode, body.turns(), continue_final_message=body.is_continued)
    return await front.threads.run(encode, num_bytes)


async def _events(generation: Generation, model_name: str) -> AsyncGenerator[Event]:
    """In Anthropic's order; the first comes with the first token, and a block of text once there is some."""
    [answer] = generation.answers
    has_begun = has_block = False
    async with aclosing(generation.run()) as deltas:
        async for _, delta in deltas:
            if not has_begun:
                has_begun = True
                yield {"type": "message_start", "message": _message(answer, model_name)}
            if delta.text and not has_block:
                has_block = True
                block = {"type": "text", "text": "", "citations": None}
                yield {"type": "content_block_start", "index": 0, "content_block": block}
            if delta.text:
                change = {"type": "text_delta", "text": delta.text}
                yield {"type": "content_block_delta", "index": 0, "delta": change}
    ending = _ending(answer)
    if has_block:
        yield {"type": "content_block_stop", "index": 0}
    yield {"type": "message_delta", "delta": ending, "usage": _counts(answer)}
    yield {"type": "message_stop"}


def _message(answer: Answer, model_name: str) -> dict[str, Any]:
    """The message before its content and its end."""
    return {
        "id": answer.request.rid,
        "type": "message",
        "role": "assistant",
        "model": model_name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "stop_details": None,
        "container": None,
        "usage": {**_counts(answer), "service_tier": "standard"},
    }


def _ending(answer: Answer) -> dict[str, Any]:
    """Why it ended. Raises AbortedError when somebody ended it."""
    finish_of(answer)
    finish = answer.finish
    assert finish is not None
    reason, sequence = "end_turn", None
    if finish.type is FinishType.LENGTH:
        reason = "max_tokens"
    elif isinstance(finish.matched, str):
        reason, sequence = "stop_sequence", finish.matched
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


def _counts(answer: Answer) -> dict[str, int]:
    """Tokens so far; of the prompt, those from the cache are counted apart."""
    return {
        "input_tokens": len(answer.request.input_ids) - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.token_ids),
    }
