"""`/v1/chat/completions`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, final

from fastapi import Request
from pydantic import Field, model_validator
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.answer import Answer, AnswerDelta, Prompt
from jsg.processing.chat_template import ChatTemplate
from jsg.server.caller import ApiCall, CurrentCall
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_SCORES
from jsg.server.http.body import Checked
from jsg.server.http.json_body import BodyBytes, new_router
from jsg.server.openai.body import MAX_NAME_CHARS, NO_GRAMMAR, Only, OpenAIBody
from jsg.server.openai.common import TokenNames, finish_of, head_of, respond, shown_logprob
from jsg.server.openai.messages import Message
from jsg.types import MAX_TOP_LOGPROBS, TokenLogprob

_NO_TOOLS = "calls of tools are not in this version; describe the tools in a message and read the calls from the text"
_NO_AUDIO = "models write text only in this version"
_THOUGHTS = "thoughts are not told apart from the answer in this version; they are in its text"
_OWN_TEMPLATE = "a template is a program, and programs of clients are never run; send text to /v1/completions"

router = new_router()


class ChatBody(OpenAIBody):
    """A conversation, and how to go on in it."""

    PROMPT: ClassVar[str] = "messages"

    REFUSED: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.REFUSED,
        **dict.fromkeys(("audio", "modality"), _NO_AUDIO),
        "functions": _NO_TOOLS,
        "chat_template": _OWN_TEMPLATE,
        "documents": "write them into a message",
        "echo": "with continue_final_message put the last message in front of the answer",
        "moderation": "answers are not moderated here",
        "prediction": "it would change the speed only, and not here; leave it out",
        "prompt_cache_options": "prefixes are cached to the last token and the least recently used go first",
        "verbosity": "say it in a system message",
        "web_search_options": "the server looks nothing up",
    }

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.ACCEPTED,
        "response_format": '`{"type": "text"}` only; ' + NO_GRAMMAR,
        "tools": "an empty list only; no tool is ever called",
        "tool_choice": '"none" only; no tool is ever called',
        "function_call": '"none" only; no function is ever called',
        "parallel_tool_calls": "no tool is ever called",
        "modalities": '`["text"]` only; models write text',
        "service_tier": '"auto" and "default" only; there is one tier',
        "store": "false only; /v1/responses stores answers",
        "prompt_cache_key": "every request of a key finds every prefix of it; cache_salt parts them",
        "prompt_cache_retention": '"in_memory" only; a prefix stays as long as there is room',
        "add_special_tokens": "false only; the chat template writes them",
        **dict.fromkeys(("separate_reasoning", "stream_reasoning"), "SGLang's router sends them always; " + _THOUGHTS),
        "include_reasoning": "true only; " + _THOUGHTS,
    }

    messages: Annotated[Checked[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(
        None, ge=0, lt=2**31, description="Tokens to generate at most; absent is all that there is room for."
    )
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="The old name of `max_completion_tokens`.")
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="OpenAI's limit is 20.")
    safety_identifier: str | None = Field(None, max_length=MAX_NAME_CHARS, description="The new name of `user`.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="Given to the chat template; refused where that does not read it."
    )
    add_generation_prompt: bool | None = Field(None, description="False: do not begin a turn of the assistant.")
    continue_final_message: bool | None = Field(None, description="Go on in the last message, an assistant's.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables of the chat template, such as `enable_thinking`; one that it does not read is refused.",
    )

    response_format: Annotated[Any, Only(({"type": "text"},), NO_GRAMMAR)] = None
    tools: Annotated[Any, Only(([],), _NO_TOOLS)] = None
    tool_choice: Annotated[Any, Only(("none",), _NO_TOOLS)] = None
    function_call: Annotated[Any, Only(("none",), _NO_TOOLS)] = None
    parallel_tool_calls: bool | None = None
    modalities: Annotated[Any, Only((["text"],), _NO_AUDIO)] = None
    service_tier: Annotated[Any, Only(("auto", "default"), "there is one tier; leave it out")] = None
    store: Annotated[Any, Only((False,), "chat completions are not stored; use /v1/responses")] = None
    prompt_cache_key: str | None = Field(None, max_length=MAX_NAME_CHARS)
    prompt_cache_retention: Annotated[Any, Only(("in_memory",), "a prefix stays as long as there is room")] = None
    add_special_tokens: Annotated[Any, Only((False,), "the chat template writes them")] = None
    separate_reasoning: bool | None = None
    stream_reasoning: bool | None = None
    include_reasoning: Annotated[Any, Only((True,), _THOUGHTS)] = None

    @property
    def max_new_tokens(self) -> int | None:
        """The client's limit, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def template_kwargs(self, template: ChatTemplate) -> dict[str, Any]:
        """Variables for the chat template. Raises RequestError for an effort that it does not read."""
        kwargs = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is None:
            return kwargs
        if "reasoning_effort" not in template.variables:
            raise RequestError(
                "reasoning_effort is not supported: the model's chat template does not read it; leave it out",
                param="reasoning_effort",
            )
        return {**kwargs, "reasoning_effort": self.reasoning_effort}

    def _names(self) -> dict[str, str]:
        limit = {} if self.max_completion_tokens is None else {"max_new_tokens": "max_completion_tokens"}
        return super()._names() | limit | {"top_logprobs_num": "top_logprobs"}

    def _params(self) -> dict[str, str]:
        return super()._params() | ({"max_new_tokens": self.PROMPT} if self.max_new_tokens is None else {})

    @model_validator(mode="after")
    def _check_chat_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true; set it, or leave this out", "top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError("max_tokens is the old name of max_completion_tokens; give only one", "max_tokens")
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt begins a new message, so continue_final_message must not be true with it; give "
                "only one",
                "add_generation_prompt",
            )
        return self


@final
class ChatChoice:
    """One answer as a message, or as changes to one."""

    def __init__(self, index: int, answer: Answer, names: TokenNames) -> None:
        self.answer = answer
        self._index = index
        self._names = names
        self._has_begun = False

    def whole(self) -> dict[str, Any]:
        """The finished answer."""
        message = {"role": "assistant", "content": self.answer.text, "refusal": None}
        logprobs = self._logprobs(self.answer.logprobs)
        return {"index": self._index, "message": message, "logprobs": logprobs, **finish_of(self.answer)}

    def pieces(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """The role, once; the text; the reason for the end."""
        finish = finish_of(self.answer)
        pieces = []
        if not self._has_begun:
            self._has_begun = True
            pieces.append(self._piece({"role": "assistant", "content": "", "refusal": None}))
        if delta.text or (delta.logprobs and self.answer.request.return_logprob):
            pieces.append(self._piece({"content": delta.text}, delta.logprobs))
        if delta.finish is not None:
            pieces.append({**self._piece({}), **finish})
        return pieces

    def _piece(self, change: dict[str, Any], scored: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        logprobs = self._logprobs(scored) if scored else None
        return {"index": self._index, "delta": change, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.answer.request.return_logprob:
            return None
        content = [
            self._entry(token.token_id, token.logprob or 0.0)
            | {"top_logprobs": [self._entry(*candidate) for candidate in token.top]}
            for token in scored
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.name(token_id),
            "bytes": self._names.raw(token_id),
            "logprob": shown_logprob(logprob),
        }


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatBody, request: Request, num_bytes: BodyBytes, call: CurrentCall, front: ReadyFront
) -> Response:
    """Answers a conversation; `n` times with `n`, as events with `stream`."""
    front.check_model(body.model)
    call = dataclasses.replace(call, user=body.safety_identifier or body.user)
    with body.own_names():
        prompt = await _prompt(body, num_bytes, call, front)
        generation = front.generator.begin(call, [prompt])
        names = TokenNames(front.generator.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        return await respond(
            request,
            body,
            generation,
            [ChatChoice(index, answer, names) for index, answer in enumerate(generation.answers)],
            head_of(prompt.rid, front) | {"service_tier": None},
            kind="chat.completion",
            event_kind="chat.completion.chunk",
        )


async def _prompt(body: ChatBody, num_bytes: int, call: ApiCall, front: Front) -> Prompt:
    template = front.chat.template

    def encode() -> tuple[int, ...]:
        return front.chat.encode(
            [message.to_template(template) for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
            template_kwargs=body.template_kwargs(template),
        )

    input_ids = await front.threads.run(encode, num_bytes)
    limit = body.max_new_tokens
    if limit is None:
        limit = default_limit(body, front.generator.info.max_request_tokens - len(input_ids))
    return body.to_prompt(
        call,
        body.response_id("chatcmpl"),
        input_ids,
        max_new_tokens=limit,
        is_continued=bool(body.continue_final_message),
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
    )


def default_limit(body: ChatBody, room: int) -> int:
    """Tokens to generate where the client names no number: all that there is room for, and can be scored if asked."""
    if body.logprobs:
        room = min(room, MAX_SCORES // (body.num_answers * (1 + (body.top_logprobs or 0))))
    return max(1, room)
