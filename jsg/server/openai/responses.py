"""`/v1/responses`: conversations that the server may keep."""

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Depends, Query, Request
from starlette.responses import Response

from jsg.errors import NotFoundError, PreviousResponseError, RequestError, shown_name
from jsg.processing.tokenizer import Tokenizer
from jsg.server.caller import Caller, CurrentCall, CurrentCaller
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_SCORES, new_rid
from jsg.server.http.event_stream import respond_with_events, until_disconnect, writer_of
from jsg.server.http.failures import json_response
from jsg.server.http.field_rules import FieldRules
from jsg.server.http.json_body import CurrentRules, new_router
from jsg.server.http.json_pieces import json_pieces
from jsg.server.http.long_response import joined, respond_in_pieces
from jsg.server.openai.common import TokenNames
from jsg.server.openai.response_store import Picture, ResponseStore, StoredResponse, Turn, compact
from jsg.server.openai.responses_body import (
    SEALED,
    InputItem,
    InputTokensBody,
    ResponsesBody,
)
from jsg.server.openai.responses_events import events_of
from jsg.server.openai.responses_reply import Reply, shown_call, shown_thoughts
from jsg.server.openai.responses_tools import ResponsesToolChoice, arguments_of, input_of
from jsg.server.openai.turns import messages_of
from jsg.server.shared.beginning import begin
from jsg.server.shared.messages import DROPPED
from jsg.server.shared.thinking_fields import template_wishes
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.prompts.chat_template import ChatTemplate
from jsg.speech.prompts.encode_parts import EncodedPrompt
from jsg.speech.reply_plan import ReplyPlan
from jsg.types import FinishType, altered

DEFAULT_ITEMS, MAX_ITEMS = 20, 100  # of one page of input items

_LETTERS = {
    **{"function_call": "fc", "function_call_output": "fco", "reasoning": "rs"},
    **{"custom_tool_call": "ctc", "custom_tool_call_output": "ctco"},
    **{"local_shell_call": "lsc", "local_shell_call_output": "lsco"},
}
"""Type of an item → what its name begins with; `msg` for others."""

router = new_router()


async def _response_store(request: Request) -> ResponseStore:
    return request.app.state.responses


Responses = Annotated[ResponseStore, Depends(_response_store)]


@router.post("/v1/responses")
async def create_response(
    body: ResponsesBody,
    request: Request,
    rules: CurrentRules,
    call: CurrentCall,
    front: ReadyFront,
    responses: Responses,
) -> Response:
    """Answers an input, which may continue a stored response; with `stream` it sends events."""
    front.check_model(body.model)
    rid = new_rid()
    turns = _turns(body, rid, call.caller, responses, front.chat.template, rules)
    turn = functools.partial(front.generator.share.turn, call.caller.tenant)
    call = altered(call, user=body.safety_identifier or body.user)
    plan = body.plan(front.speech)
    prompt = await _prompt(body, turns, rid, call.caller, front, plan, rules)
    generation = await begin(request, front, call, [prompt])
    [answer] = generation.answers
    names = TokenNames(front.generator.tokenizer, as_ids=False)
    asked, now, seals = _asked(body, prompt, front), int(time.time()), SEALED in (body.include or ())
    reply = Reply(rid, asked, answer, body.origins, names, now, seals_thoughts=seals)

    async def keep(shown: dict[str, Any]) -> dict[str, Any]:
        """Stores the response if the client wants it. A response that is too large says that it is not kept."""
        if body.store is False:
            return shown
        output = _output_turns(reply, prompt, front.generator.tokenizer)
        body_json = await joined(json_pieces(shown), turn)
        stored = StoredResponse(reply.response_id, body_json, (*turns, *output), num_output=len(output))
        return shown if responses.put(call.caller.tenant, stored) else shown | {"store": False}

    if body.stream:
        events = events_of(reply, generation, keep, writer_of(request))
        return respond_with_events(request, events, named=True, turn=turn)
    await until_disconnect(request, reply.take_all(generation))
    return await respond_in_pieces(json_pieces(await keep(reply.ended())), turn)


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(
    body: InputTokensBody, rules: CurrentRules, caller: CurrentCaller, front: ReadyFront, responses: Responses
) -> Response:
    """Counts the tokens of the prompt."""
    front.check_model(body.model)
    turns = _turns(body, new_rid(), caller, responses, front.chat.template, rules)
    encoded = await _encode(body, turns, front, body.plan(front.speech), caller.namespace(), rules)
    return json_response({"object": "response.input_tokens", "input_tokens": len(encoded.input_ids)})


@router.post("/v1/responses/compact")
async def compact_conversation() -> Response:
    """Refuses the call, because the server never shortens a conversation."""
    raise NotFoundError(
        "/v1/responses/compact is not supported: the server never shortens a conversation; shorten it yourself, and "
        "send it as input"
    )


@router.get("/v1/responses/{response_id}")
async def get_response(response_id: str, request: Request, caller: CurrentCaller, responses: Responses) -> Response:
    """Gives a stored response."""
    _refuse_query(request)
    shown = _stored(response_id, caller, responses).shown
    return json_response(msgspec.Raw(shown))


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, caller: CurrentCaller, responses: Responses) -> Response:
    """Deletes a stored response; the responses that continue it stay as they are."""
    _refuse_query(request)
    if not responses.remove(caller.tenant, response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request, caller: CurrentCaller, responses: Responses) -> Response:
    """Refuses the call, because no response is made in the background."""
    _refuse_query(request)
    _stored(response_id, caller, responses)
    raise RequestError(
        "only a response that is made in the background can be cancelled, but the server makes none; to end a "
        "response, close its connection or send its id to /abort_request",
        param="response_id",
    )


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    caller: CurrentCaller,
    responses: Responses,
    after: Annotated[str | None, Query(description="The list begins behind the item of this id.")] = None,
    limit: Annotated[int, Query(ge=1, le=MAX_ITEMS, description="The largest number of items.")] = DEFAULT_ITEMS,
    order: Annotated[Literal["asc", "desc"], Query(description='"asc" lists the oldest item first.')] = "desc",
) -> Response:
    """Lists the input items of a stored response, with the items of the responses that it continues."""
    _refuse_query(request, "after", "limit", "order")
    stored = _stored(response_id, caller, responses)
    turns: Sequence[Turn] = stored.turns[: len(stored.turns) - stored.num_output]
    turns = turns if order == "asc" else turns[::-1]
    names = [turn.item_id for turn in turns]
    if after is not None and after not in names:
        raise RequestError(f"after must be the id of an item in the list, but got {after[:100]!r}; correct it", "after")
    first = 0 if after is None else names.index(after) + 1
    page = turns[first : first + limit]
    return json_response(
        {
            "object": "list",
            "data": [_shown_item(turn) for turn in page],
            "first_id": page[0].item_id if page else None,
            "last_id": page[-1].item_id if page else None,
            "has_more": first + limit < len(turns),
        }
    )


def _turns(
    body: ResponsesBody | InputTokensBody,
    rid: str,
    caller: Caller,
    responses: ResponseStore,
    template: ChatTemplate,
    rules: FieldRules,
) -> tuple[Turn, ...]:
    """The conversation up to the answer, without instructions. Raises RequestError or NotFoundError.

    The rules take note of thoughts that the client sends and the template does not read.
    """
    past: tuple[Turn, ...] = ()
    if body.previous_response_id is not None:
        previous = responses.get(caller.tenant, body.previous_response_id)
        if previous is None:
            raise PreviousResponseError(
                f"previous_response_id must name a stored response, but {body.previous_response_id!r} is not found: it "
                "was never stored, was deleted, or was dropped for want of room; send the whole conversation as input",
                param="previous_response_id",
            )
        past = previous.turns
    if isinstance(body.input, str):
        return (*past, Turn(f"msg_{rid}_0", "user", body.input))
    new = [_turn(item, rid, index, caller, responses) for index, item in enumerate(body.input)]
    new = [turn for turn in new if turn.text or not turn.is_thought]
    if all(turn.is_thought for turn in (*past, *new)):
        raise RequestError("input must say something besides thoughts, but does not; add a message", "input")
    if any(turn.is_thought for turn in new) and template.thoughts_field is None:
        rules.note("an item of type reasoning", DROPPED)
    elif new and new[-1].is_thought:
        rules.note("an item of type reasoning", "no answer of the assistant follows it; leave it out")
    return (*past, *new)


def _turn(item: InputItem, rid: str, index: int, caller: Caller, responses: ResponseStore) -> Turn:
    """The turn of an item. A stored message has the tokens that the model wrote."""
    stored = None if item.id is None else responses.turn(caller.tenant, item.id)
    if stored is not None and item.is_reference:
        return stored
    if item.speaker is None:
        raise NotFoundError(f"input must refer to stored items, but {item.id!r} is not found; send the item instead")
    made = Turn(
        f"{_LETTERS.get(item.type or '', 'msg')}_{rid}_{index}",
        item.speaker,
        item.text,
        call_id=item.call_id or (item.id if item.called == "local_shell" else None),
        name="local_shell" if item.action is not None else item.name,
        pictures=item.pictures,
        places=item.places,
        is_thought=item.is_thought,
        namespace=item.namespace,
        called=item.called,
    )
    return dataclasses.replace(stored, places=made.places) if stored and stored.says_the_same(made) else made


async def _encode(
    body: ResponsesBody | InputTokensBody,
    turns: Sequence[Turn],
    front: Front,
    plan: ReplyPlan,
    namespace: str,
    rules: FieldRules,
) -> EncodedPrompt:
    turns = turns if body.instructions is None else [Turn("", "system", body.instructions), *turns]
    num_chars = sum(len(turn.text) + sum(len(picture.url) for picture in turn.pictures) for turn in turns)
    template = front.chat.template
    messages, answers = await front.threads.run(lambda: messages_of(turns, template, rules), num_chars)
    return await front.media.chat(
        front.chat,
        plan,
        lambda: messages,
        num_chars,
        namespace=namespace,
        answers=answers,
        template_kwargs=template_wishes(plan, body.asked_of_thoughts, rules),
    )


async def _prompt(
    body: ResponsesBody,
    turns: Sequence[Turn],
    rid: str,
    caller: Caller,
    front: Front,
    plan: ReplyPlan,
    rules: FieldRules,
) -> Prompt:
    namespace = caller.namespace(body.cache_salt, body.extra_key)
    encoded = await _encode(body, turns, front, plan, namespace, rules)
    num_top = body.top_logprobs or 0
    room = front.generator.info.max_request_tokens - len(encoded.input_ids)
    if body.wants_logprobs:
        room = min(room, MAX_SCORES // (1 + num_top))
    limit = max(1, room) if body.max_output_tokens is None else body.max_output_tokens
    prompt = Prompt(
        rid=f"resp_{rid}",
        **encoded.fields,
        sampling=body.to_sampling(limit, plan),
        is_continued=False,
        return_logprob=body.wants_logprobs,
        top_logprobs_num=num_top,
        namespace=namespace,
        priority=body.priority or 0,
    )
    return plan.ready(prompt, rules.pass_over)


def _asked(body: ResponsesBody, prompt: Prompt, front: Front) -> dict[str, Any]:
    """The fields that the response repeats of its request. OpenAI defines names as texts, which are never null."""
    named = {name: getattr(body, name) for name in ("prompt_cache_key", "safety_identifier", "user")}
    return {
        **{name: value for name, value in named.items() if value is not None},
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": front.model_name,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_retention": body.prompt_cache_retention,
        "reasoning": _asked_reasoning(body),
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": prompt.sampling.temperature,
        "text": {"format": _asked_format(body)},
        "tool_choice": _asked_choice(body),
        "tools": [tool.shown() for tool in body.tools or ()],
        "top_logprobs": prompt.top_logprobs_num,
        "top_p": prompt.sampling.top_p,
        "truncation": "disabled",
    }


def _asked_reasoning(body: ResponsesBody) -> dict[str, Any] | None:
    asked = body.reasoning
    return None if asked is None else {"effort": asked.effort, "summary": asked.summary or asked.generate_summary}


def _asked_format(body: ResponsesBody) -> dict[str, Any]:
    form = None if body.text is None else body.text.format
    return {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)


def _asked_choice(body: ResponsesBody) -> Any:
    chosen = body.tool_choice
    return chosen.model_dump(exclude_none=True) if isinstance(chosen, ResponsesToolChoice) else chosen or "auto"


def _output_turns(reply: Reply, prompt: Prompt, tokenizer: Tokenizer) -> list[Turn]:
    """The model's output as turns of the conversation. A message keeps its tokens if there is nothing else to read."""
    is_alone = [item.kind for item in reply.items if item.kind != "reasoning"] == ["message"]
    has_thoughts = prompt.thoughts is not None
    token_ids = own_tokens(reply.answer, tokenizer, has_thoughts=has_thoughts) if is_alone else ()
    return [
        Turn(
            item.item_id,
            "assistant",
            arguments_of(item.text) if item.kind == "custom_tool_call" else item.text,
            token_ids if item.kind == "message" else (),
            item.status == "completed",
            item.call_id,
            item.name,
            is_thought=item.kind == "reasoning",
            namespace=item.namespace,
            called="custom_tool" if item.kind == "custom_tool_call" else "function",
        )
        for item in reply.items
    ]


def own_tokens(answer: Answer, tokenizer: Tokenizer, *, has_thoughts: bool) -> Sequence[int]:
    """The tokens of the answer's text: without its thoughts, and without the token that ended it.

    Templates write both again, or leave thoughts out. There are none where the text begins inside a token.
    """
    finish, token_ids = answer.finish, answer.token_ids
    if finish is not None and finish.type is FinishType.STOP and token_ids and token_ids[-1] == finish.matched:
        token_ids = token_ids[:-1]
    if not has_thoughts:
        return compact(token_ids)
    start, num_bytes = len(token_ids), len(answer.text.encode())
    while start and num_bytes > 0:
        start -= 1
        num_bytes -= len(tokenizer.token_bytes(token_ids[start]))
    return compact(token_ids[start:]) if num_bytes == 0 else ()


def _shown_item(turn: Turn) -> dict[str, Any]:
    status = "completed" if turn.is_whole else "incomplete"
    if turn.is_thought:
        return shown_thoughts(turn.item_id, turn.text, status)
    if turn.call_id is not None:
        kind = f"{turn.called}_call"
        shown = {"id": turn.item_id, "call_id": turn.call_id, "status": status}
        if turn.is_result:
            named = {} if turn.name is None else {"name": turn.name}
            return {"type": f"{kind}_output", **shown, **named, "output": turn.text}
        if turn.called == "local_shell":
            return {"type": kind, **shown, "action": msgspec.json.decode(turn.text)}
        said = {"input": input_of(turn.text)} if turn.called == "custom_tool" else {"arguments": turn.text}
        return shown_call(turn.item_id, status, turn.call_id, turn.name, turn.namespace, **said)
    kind = "output_text" if turn.role == "assistant" else "input_text"
    parts: list[dict[str, Any]] = []
    for piece in turn.pieces:
        if isinstance(piece, Picture):
            parts.append({"type": "input_image", "image_url": piece.url, "detail": "auto", "file_id": None})
        else:
            parts.append({"type": kind, "text": piece} | ({"annotations": []} if turn.role == "assistant" else {}))
    return {"type": "message", "id": turn.item_id, "status": status, "role": turn.role, "content": parts}


def _stored(response_id: str, caller: Caller, responses: ResponseStore) -> StoredResponse:
    stored = responses.get(caller.tenant, response_id)
    if stored is None:
        raise _not_found(response_id)
    return stored


def _not_found(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"response_id must name a stored response, but {response_id[:100]!r} is not found: it was never stored, was "
        "deleted, or was dropped for want of room; create it again"
    )


def _refuse_query(request: Request, *known: str) -> None:
    """Raises RequestError for parameters of the query that nothing reads."""
    for name in request.query_params:
        if name not in known:
            message = f"{shown_name(name)} is not supported in the query of this endpoint; leave it out"
            raise RequestError(message, name[:100])
