"""Anthropic's `/v1/messages`."""

from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal, final

import msgspec
from fastapi import Request
from starlette.responses import Response

from jsg.processing.growing_text import GrowingText
from jsg.server.anthropic.body import CountTokensBody, MessagesBody
from jsg.server.caller import CurrentCall, CurrentCaller
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import Generation, new_rid
from jsg.server.http.event_stream import (
    Event,
    EventForm,
    Events,
    Write,
    respond_with_events,
    until_disconnect,
    writer_of,
)
from jsg.server.http.failures import json_response
from jsg.server.http.field_rules import FieldRules
from jsg.server.http.json_body import BodyBytes, CurrentRules, new_router
from jsg.server.shared.answers import finish_of, reports_of
from jsg.server.shared.beginning import begin
from jsg.server.shared.messages import DROPPED, check_fits, fit_thoughts
from jsg.server.shared.thinking_fields import template_wishes
from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt
from jsg.speech.answers.tool_calls import CallDelta, ContentDelta, ToolDelta
from jsg.speech.prompts.encode_parts import EncodedPrompt
from jsg.speech.reply_plan import ReplyPlan
from jsg.speech.rules.thinking import sealed, signature_of
from jsg.types import FinishType, altered

router = new_router()


@router.post("/v1/messages")
async def create_message(
    body: MessagesBody,
    request: Request,
    num_bytes: BodyBytes,
    rules: CurrentRules,
    call: CurrentCall,
    front: ReadyFront,
) -> Response:
    """Answers a conversation; with `stream` it sends events."""
    front.check_model(body.model)
    call = altered(call, user=body.user)
    plan = body.plan(front.speech)
    namespace = call.caller.namespace(body.cache_salt, body.extra_key)
    prompt = Prompt(
        rid=f"msg_{new_rid()}",
        **(await _encode(body, num_bytes, rules, front, plan, namespace)).fields,
        sampling=body.to_sampling(plan),
        is_continued=body.is_continued,
        namespace=namespace,
        priority=body.priority or 0,
    )
    prompt = plan.ready(prompt, rules.pass_over, only_complete=not body.stream)
    generation = await begin(request, front, call, [prompt])
    blocks = _Blocks(body.thought_display)
    if body.stream:
        events = _events(generation, blocks, front.model_name, writer_of(request))
        return respond_with_events(request, events, named=True)
    await until_disconnect(request, generation.complete())
    [answer] = generation.answers
    found = answer.parsed
    content = blocks.thoughts_of(answer)
    content += [_text_block(found.content)] if found.content else []
    content += [_call_block(call.id, call.name, msgspec.json.decode(call.arguments)) for call in found.calls]
    ending = _ending(answer, has_calls=bool(found.calls))
    message = _message(answer, front.model_name)
    return json_response({**message, "content": content, **ending, **reports_of(answer)})


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    body: CountTokensBody, num_bytes: BodyBytes, rules: CurrentRules, caller: CurrentCaller, front: ReadyFront
) -> Response:
    """Counts the tokens of the prompt."""
    front.check_model(body.model)
    plan = body.plan(front.speech)
    encoded = await _encode(body, num_bytes, rules, front, plan, caller.namespace(), names_points=False)
    return json_response({"input_tokens": len(encoded.input_ids)})


async def _encode(
    body: CountTokensBody, num_bytes: int, rules: FieldRules, front: Front, plan: ReplyPlan, namespace: str,
    *, names_points: bool = True,
) -> EncodedPrompt:  # fmt: skip
    template = front.chat.template

    def turns() -> list[dict[str, Any]]:
        found = body.turns(rules)
        for turn in found:
            if not fit_thoughts(turn, template):
                rules.note("a block of type thinking", DROPPED)
            check_fits(turn, template)
        return found

    return await front.media.chat(
        front.chat,
        plan,
        turns,
        num_bytes,
        namespace=namespace,
        template_kwargs=template_wishes(plan, body.asked_of_thoughts, rules),
        names_points=names_points,
    )


async def _events(generation: Generation, blocks: "_Blocks", model_name: str, write: Write) -> AsyncGenerator[Events]:
    """The events in Anthropic's order. The first comes with the first token, and a block once it has content."""
    [answer] = generation.answers
    has_begun = False
    with generation.run() as deltas:
        async for _, delta in deltas:
            if (more := blocks.text_event(delta)) is not None:
                yield more
                continue
            events: list[Event] = []
            if not has_begun:
                has_begun = True
                deltas.senders[0] = lambda delta: (more := blocks.text_event(delta)) is not None and write(more)
                events.append({"type": "message_start", "message": _message(answer, model_name)})
            events += blocks.think(delta.thoughts)
            for found in delta.parts:
                events += blocks.events(found)
            if events:
                yield events
    ending = _ending(answer, has_calls=answer.has_calls)
    last = {"type": "message_delta", "delta": ending, "usage": _counts(answer), **reports_of(answer)}
    yield [*blocks.end(), last, {"type": "message_stop"}]


@final
class _Blocks:
    """The blocks of an answer, one after the other: thoughts, texts, and one for each call."""

    def __init__(self, display: Literal["summarized", "omitted"] | None) -> None:
        """As `MessagesBody.thought_display`."""
        self._text_form: EventForm | None = None  # of more text in the block that is open
        self._display = display
        self._thoughts = GrowingText()
        self._index = -1
        self._open: str | int | None = None  # "thinking", "text", or the number of a call

    def thoughts_of(self, answer: Answer) -> list[dict[str, Any]]:
        """The block of the thoughts of a whole answer, if it has one."""
        if self._display is None or not answer.thoughts:
            return []
        shown = answer.thoughts if self._display == "summarized" else ""
        return [_thinking_block(shown, self._signature(answer.thoughts))]

    def think(self, thoughts: str) -> Iterator[Event]:
        """The events of new thoughts, which come before everything else."""
        if self._display is None or not thoughts:
            return
        if self._open is None:
            yield from self._begin("thinking", _thinking_block("", ""))
        self._thoughts.append(thoughts)
        if self._display == "summarized":
            yield self._change({"type": "thinking_delta", "thinking": thoughts})

    def events(self, found: ToolDelta) -> Iterator[Event]:
        """The events of a text or a call."""
        match found:
            case ContentDelta(text):
                if self._open != "text":
                    yield from self._begin("text", _text_block(""))
                yield self._change({"type": "text_delta", "text": text})
            case CallDelta(index, call_id, name, arguments):
                if self._open != index:
                    yield from self._begin(index, _call_block(call_id, name, {}))
                if arguments:
                    yield self._change({"type": "input_json_delta", "partial_json": arguments})

    def text_event(self, delta: AnswerDelta) -> bytes | None:
        """The event of a delta that is only more text in the block that is open."""
        text, form = delta.only_text, self._text_form
        return form.fill(text) if text and form is not None else None

    def end(self) -> Iterator[Event]:
        """Ends the block that is open, if one is."""
        if self._open == "thinking":
            yield self._change({"type": "signature_delta", "signature": self._signature(str(self._thoughts))})
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}

    def _begin(self, kind: str | int, block: dict[str, Any]) -> Iterator[Event]:
        yield from self.end()
        self._open = kind
        self._index += 1
        more = {"type": "text_delta", "text": EventForm.GAP}
        self._text_form = EventForm(self._change(more), named=True) if kind == "text" else None
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _signature(self, thoughts: str) -> str:
        """Thoughts that are not shown travel in their signature, so that the client can send them back."""
        return sealed(thoughts) if self._display == "omitted" else signature_of(thoughts)

    def _change(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _thinking_block(thoughts: str, signature: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": thoughts, "signature": signature}


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _call_block(call_id: str | None, name: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def _message(answer: Answer, model_name: str) -> dict[str, Any]:
    """The message before its content and its end. Only what Anthropic defines as null is null: the end."""
    return {
        "id": answer.request.rid,
        "type": "message",
        "role": "assistant",
        "model": model_name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {**_counts(answer), "service_tier": "standard"},
    }


def _ending(answer: Answer, *, has_calls: bool) -> dict[str, Any]:
    """Why the answer ended. Raises AbortedError where it was aborted."""
    finish_of(answer)
    finish = answer.finish
    assert finish is not None
    reason, sequence = "end_turn", None
    if finish.type is FinishType.LENGTH:
        reason = "max_tokens"
    elif isinstance(finish.matched, str):
        reason, sequence = "stop_sequence", finish.matched
    elif has_calls:
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _counts(answer: Answer) -> dict[str, int]:
    """The numbers of tokens so far. Prompt tokens from the cache are counted apart."""
    return {
        "input_tokens": len(answer.request.input_ids) - answer.cached_tokens,
        "cache_read_input_tokens": answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(answer.token_ids),
    }
