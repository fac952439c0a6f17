"""`/v1/chat/completions`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, final

from fastapi import Request
from pydantic import Field, model_validator
from starlette.responses import Response

from jsg.errors import ContextLengthError, RequestError
from jsg.processing.tokenizer import Tokenizer
from jsg.prompt_ids import PromptIds
from jsg.server.caller import ApiCall, CurrentCall, CurrentCaller
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import MAX_SCORES
from jsg.server.http.body import Body, Checked
from jsg.server.http.field_rules import FieldRules
from jsg.server.http.json_body import BodyBytes, CurrentRules, new_router
from jsg.server.http.json_pieces import json_pieces
from jsg.server.http.long_response import respond_in_pieces
from jsg.server.openai.body import OpenAIBody
from jsg.server.openai.common import TokenNames, head_of, rendered, respond
from jsg.server.openai.tools import NamedFunction, ToolChoice, shown_call, shown_change
from jsg.server.shared.answers import finish_of, reports_of, scores_json
from jsg.server.shared.beginning import begin
from jsg.server.shared.fields import ALL_THE_ROOM, MAX_NAME_CHARS, TOP_LOGPROBS, Only
from jsg.server.shared.harmless import VALUES, harmless, template_variables
from jsg.server.shared.messages import Message
from jsg.server.shared.thinking_fields import BUDGET, EFFORT, Asked, Reasoning, Thinking, join_wishes, template_wishes
from jsg.server.shared.tools import ONE_CALL, TOOL_CHOICE, TOOLS, ChatTool, FunctionDefinition
from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt
from jsg.speech.answers.tool_calls import CallDelta, ContentDelta, ToolDelta
from jsg.speech.reply_plan import ReplyPlan
from jsg.speech.rules.thinking import Effort, ThoughtWish
from jsg.speech.rules.tool_use import MAX_TOOLS, Choice, Speech
from jsg.types import MAX_TOP_LOGPROBS, TokenLogprob, altered

_NO_AUDIO = "models of this version write text only; leave it out"
_OWN_TEMPLATE = "a template is code, and the server never runs code of clients; send text to /v1/completions"

Budget = Annotated[int, Field(ge=-1, lt=2**31)] | None

router = new_router()


class TextPart(Body):
    """A part of a predicted answer."""

    type: Literal["text"]
    text: str


class Prediction(Body):
    """A predicted answer."""

    type: Literal["content"]
    content: str | Checked[TextPart]

    def encode(self, tokenizer: Tokenizer, most: int) -> PromptIds | None:
        """Its tokens, if there are any. Raises RequestError if it is far longer than `most` tokens."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        try:
            ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False, max_tokens=most)
        except ContextLengthError:
            rule = f"prediction must have at most {2 * most} tokens, but has more; shorten it"
            raise RequestError(rule, "prediction") from None
        return PromptIds.of(ids) if ids else None


class ChatBody(OpenAIBody):
    """A conversation and the parameters of its answer."""

    PROMPT: ClassVar[str] = "messages"

    REFUSED: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.REFUSED,
        **dict.fromkeys(("audio", "modality"), _NO_AUDIO),
        "chat_template": _OWN_TEMPLATE,
        "documents": "write the documents into a message",
        "echo": "the answer never repeats a message; put the last message in front of the answer in the client",
        "moderation": "the server does not moderate answers; leave it out",
    }

    HARMLESS: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.HARMLESS,
        **harmless("prompt_cache_options"),
    }

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        **OpenAIBody.ACCEPTED,
        "modalities": 'only `["text"]` is taken, because models write text',
        "service_tier": "there is one tier; the name of another one brings a warning",
        "store": "true brings a warning, because only /v1/responses stores answers",
        "prompt_cache_key": "all requests of an API key share its cached prefixes; cache_salt separates them",
        "prompt_cache_retention": 'a prefix stays in memory while there is room; other values than "in_memory" bring a '
        "warning",
        "add_special_tokens": "only false is taken, because the chat template writes the special tokens",
    }

    messages: Annotated[Checked[Message], Field(min_length=1)] = Field(description="The conversation.")
    max_completion_tokens: int | None = Field(
        None, ge=0, lt=2**31, description=f"The largest number of tokens to generate. {ALL_THE_ROOM}"
    )
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="The old name of `max_completion_tokens`.")
    logprobs: bool | None = Field(None, description="Report the log-probability of each token.")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description=TOP_LOGPROBS)
    safety_identifier: str | None = Field(None, max_length=MAX_NAME_CHARS, description="The new name of `user`.")
    reasoning_effort: Effort | None = Field(None, description=EFFORT)
    enable_thinking: bool | None = Field(
        None, description="Whether the model thinks, where its chat template can turn that on and off."
    )
    thinking: Thinking | None = None
    reasoning: Reasoning | None = None
    thinking_budget: Budget = Field(None, description=f"From SGLang and Qwen. {BUDGET}")
    thinking_token_budget: Budget = Field(None, description="vLLM's name of `thinking_budget`.")
    thinking_budget_tokens: Budget = Field(None, description="The name of `thinking_budget` in llama.cpp.")
    separate_reasoning: bool | None = Field(
        None,
        description="From SGLang. If it is false, thoughts stand in the content, with their markers.",
    )
    include_reasoning: bool | None = Field(
        None, description="From vLLM. If it is false, thoughts are cut from the content and not shown."
    )
    stream_reasoning: bool | None = Field(
        None, description="From SGLang. If it is false, a stream has all thoughts in one event, when they have ended."
    )
    add_generation_prompt: bool | None = Field(
        None, description="If it is false, the prompt does not end with the beginning of an assistant's turn."
    )
    continue_final_message: bool | None = Field(
        None, description="The answer continues the last message, which must be an assistant's."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None,
        description="Variables of the chat template, such as `enable_thinking`. A variable that the template does not "
        "read is refused; `enable_thinking`, `thinking` and `reasoning_effort` have no effect then.",
    )
    tools: Annotated[Checked[ChatTool], Field(max_length=MAX_TOOLS)] | None = Field(None, description=TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description=ONE_CALL)
    functions: Annotated[Checked[FunctionDefinition], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="The old form of `tools`. The answer then has at most one call, as `function_call`."
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = Field(
        None, description="The old form of `tool_choice`."
    )

    # An empty object asks for a search too, so this is no field of `REFUSED`.
    web_search_options: Annotated[Any, Only((), "the server does not search the web; leave it out")] = Field(
        None, description="Refused, because the server does not search the web."
    )
    prediction: Prediction | None = Field(
        None,
        description="Text that the answer is expected to repeat for the most part. It changes the speed and not the "
        "answer: tokens of it are [drafted](../drafts.md).",
    )
    modalities: Annotated[Any, Only((["text"],), _NO_AUDIO)] = None
    service_tier: Annotated[
        Any, Only(("auto", "default"), "there is one tier; leave it out", VALUES["service_tier"])
    ] = None
    store: Annotated[Any, Only((False,), "chat completions are not stored; use /v1/responses", VALUES["store"])] = None
    prompt_cache_key: str | None = Field(None, max_length=MAX_NAME_CHARS)
    prompt_cache_retention: Annotated[
        Any, Only(("in_memory",), "a prefix stays as long as there is room", VALUES["prompt_cache_retention"])
    ] = None
    add_special_tokens: Annotated[Any, Only((False,), "the chat template writes the special tokens; leave it out")] = (
        None
    )

    @property
    def max_new_tokens(self) -> int | None:
        """The client's limit, under either name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def thought_wish(self) -> ThoughtWish:
        """What the client wants of thoughts. Raises RequestError for fields that contradict each other."""
        budgets = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens")
        own = ThoughtWish(
            self.enable_thinking,
            self.reasoning_effort,
            is_split=self.separate_reasoning is not False,
            is_shown=self.include_reasoning is not False,
            is_streamed=self.stream_reasoning is not False,
        )
        others = [given.wish for given in (self.thinking, self.reasoning) if given is not None]
        limits = [ThoughtWish(budget=getattr(self, name), budget_field=name) for name in budgets]
        return join_wishes([own, *limits, *others])

    def template_kwargs(self, plan: ReplyPlan, rules: FieldRules) -> dict[str, Any]:
        """Variables for the chat template. Raises RequestError for one without an effect where the rules are strict."""
        kwargs = template_variables(self.chat_template_kwargs, plan.speech.template.variables, rules)
        asked = {name: each.asked for name in ("thinking", "reasoning") if (each := getattr(self, name)) is not None}
        if self.reasoning_effort is not None:
            asked["reasoning_effort"] = Asked(ThoughtWish(effort=self.reasoning_effort))
        if self.enable_thinking is not None:
            asked["enable_thinking"] = Asked(ThoughtWish(self.enable_thinking))
        return template_wishes(plan, asked, rules, kwargs)

    def plan(self, speech: Speech) -> ReplyPlan:
        """How an answer is asked for and read. Raises RequestError."""
        tools = [tool.function.tool(f"tools[{i}].function") for i, tool in enumerate(self.tools or ())]
        chosen = self.tool_choice
        if self.functions:
            tools = [function.tool(f"functions[{i}]") for i, function in enumerate(self.functions)]
            chosen = self.function_call
        match chosen:
            case ToolChoice():
                choice = chosen.choice()
            case NamedFunction(name=name):
                choice = Choice("required", (name,))
            case _:
                choice = Choice(chosen or "auto")
        is_one_call = choice.is_one_call or self.parallel_tool_calls is False or bool(self.functions)
        choice = dataclasses.replace(choice, is_one_call=is_one_call)
        plan = dataclasses.replace(
            super().plan(speech), wish=self.thought_wish(), is_continued=bool(self.continue_final_message)
        )
        return plan.with_tools(tools, choice)

    def _names(self) -> dict[str, str]:
        tools = {"tools": "functions", "tool_choice": "function_call"} if self.functions else {}
        limit = {} if self.max_completion_tokens is None else {"max_new_tokens": "max_completion_tokens"}
        return tools | super()._names() | limit | {"top_logprobs_num": "top_logprobs"}

    def _params(self) -> dict[str, str]:
        return super()._params() | ({"max_new_tokens": self.PROMPT} if self.max_new_tokens is None else {})

    @model_validator(mode="after")
    def _check_chat_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise RequestError(
                "top_logprobs needs logprobs to be true, but it is not; set logprobs, or leave top_logprobs out",
                "top_logprobs",
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise RequestError(
                "max_tokens is the old name of max_completion_tokens, but the values differ; send only one",
                "max_tokens",
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt begins a new message, so continue_final_message must not be true with it, but "
                "both are; leave one out",
                "add_generation_prompt",
            )
        if self.functions and (self.tools or self.tool_choice is not None):
            raise RequestError(
                "functions must not come with tools or tool_choice, which replaced it, but does; leave it out",
                "functions",
            )
        if self.functions and self.parallel_tool_calls:
            rule = "parallel_tool_calls must not be true with functions, the old form of tools"
            raise RequestError(f"{rule}: an answer has one function_call at most; send tools", "parallel_tool_calls")
        is_named = isinstance(self.function_call, NamedFunction)
        if self.function_call is not None and (self.functions is None or (is_named and not self.functions)):
            raise RequestError(
                "function_call needs functions, but there are none; send some, or leave it out", "function_call"
            )
        return self


@final
class ChatChoice:
    """One answer as a message, or as changes to one."""

    def __init__(
        self,
        index: int,
        answer: Answer,
        names: TokenNames,
        *,
        wish: ThoughtWish,
        is_old: bool = False,
    ) -> None:
        """With `is_old` a call is shown as a `function_call`, the older form of `tool_calls`."""
        self.answer = answer
        self._index = index
        self._names = names
        self._is_old = is_old
        self._wish = wish
        self._has_begun = False
        self._num_shown = 0  # characters of the thoughts

    def whole(self) -> dict[str, Any]:
        """The finished answer."""
        found = self.answer.parsed
        thoughts = (self.answer.thoughts if self._wish.is_shown else "") or None
        message = {"role": "assistant", "content": found.content, "refusal": None, **_shown_thoughts(thoughts)}
        if found.calls and self._is_old:
            message["function_call"] = shown_call(found.calls[0])["function"]
        elif found.calls:
            message["tool_calls"] = [shown_call(call) for call in found.calls]
        choice = {"index": self._index, "message": message, "logprobs": self._logprobs(self.answer.scores)}
        finish = self._finish(is_for_calls=bool(found.calls) and not found.is_cut)
        return choice | finish | reports_of(self.answer)

    def pieces(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """First the role, once; then the text and the calls; at the end the reason for it."""
        changes = [self._change(part) for part in delta.parts if isinstance(part, CallDelta) or part.text]
        thoughts = self._new_thoughts(delta, is_over=bool(changes))
        finish = self._finish(is_for_calls=self.answer.has_calls and not self.answer.is_call_cut)
        pieces = []
        if not self._has_begun:
            self._has_begun = True
            pieces.append(self._piece({"role": "assistant", "content": "", "refusal": None}))
        if thoughts:
            pieces.append(self._piece(_shown_thoughts(thoughts)))
        scored = delta.scores if self.answer.request.return_logprob else ()
        if scored and not changes:
            changes.append({"content": ""})
        for change in changes:
            pieces.append(self._piece(change, scored))
            scored = ()
        if delta.finish is not None:
            pieces.append(self._piece({}) | finish | reports_of(self.answer))
        return pieces

    def text_piece(self, text: str) -> dict[str, Any]:
        """A piece that adds a text."""
        return self._piece({"content": text})

    def _new_thoughts(self, delta: AnswerDelta, *, is_over: bool) -> str:
        """The thoughts to show with a delta. If they are not streamed, all of them, once they are over."""
        if not self._wish.is_shown:
            return ""
        if self._wish.is_streamed:
            return delta.thoughts
        if not is_over and delta.finish is None:
            return ""
        start, self._num_shown = self._num_shown, len(self.answer.thoughts)
        return self.answer.thoughts[start:]

    def _change(self, part: ToolDelta) -> dict[str, Any]:
        match part:
            case ContentDelta(text):
                return {"content": text}
            case CallDelta():
                shown = shown_change(part)
                return {"function_call": shown["function"]} if self._is_old else {"tool_calls": [shown]}

    def _finish(self, *, is_for_calls: bool) -> dict[str, Any]:
        """Why the answer ended. A whole answer with calls, all complete, ends because of its calls."""
        finish = finish_of(self.answer)
        if is_for_calls and finish["finish_reason"] == "stop":
            finish["finish_reason"] = "function_call" if self._is_old else "tool_calls"
        return finish

    def _piece(self, change: dict[str, Any], scored: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
        logprobs = self._logprobs(scored) if scored else None
        # Clients of SGLang read this field of every delta without looking whether it is there.
        delta = {"reasoning_content": None, **change}
        return {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.answer.request.return_logprob:
            return None

        def show(start: int, stop: int) -> dict[str, list[Any]]:
            return {"content": self._names.scores(scored[start:stop])}

        return {**scores_json(show, len(scored), self.answer.request), "refusal": None}


def _shown_thoughts(thoughts: str | None) -> dict[str, str | None]:
    """Thoughts under the name that most servers have for them, and under vLLM's newer name."""
    return {"reasoning_content": thoughts, "reasoning": thoughts}


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatBody,
    request: Request,
    num_bytes: BodyBytes,
    rules: CurrentRules,
    call: CurrentCall,
    front: ReadyFront,
) -> Response:
    """Answers a conversation `n` times; with `stream` it sends events."""
    front.check_model(body.model)
    call = altered(call, user=body.safety_identifier or body.user)
    plan = body.plan(front.speech)
    prompt = plan.ready(await _prompt(body, num_bytes, rules, call, front, plan), rules.pass_over)
    generation = await begin(request, front, call, [prompt])
    names = TokenNames(front.generator.tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
    return await respond(
        request,
        front,
        body,
        generation,
        [
            ChatChoice(index, answer, names, wish=plan.wish, is_old=bool(body.functions))
            for index, answer in enumerate(generation.answers)
        ],
        head_of(prompt.rid, front) | {"service_tier": None},
        kind="chat.completion",
        event_kind="chat.completion.chunk",
    )


@router.post("/v1/chat/completions/render")
async def render_chat_completions(
    body: ChatBody, num_bytes: BodyBytes, rules: CurrentRules, caller: CurrentCaller, front: ReadyFront
) -> Response:
    """Gives the tokens of the prompt and generates nothing, for routers that look for them in caches."""
    front.check_model(body.model)
    call = ApiCall(caller=caller, route="/v1/chat/completions")
    plan = body.plan(front.speech)
    shown = rendered(await _prompt(body, num_bytes, rules, call, front, plan))
    return await respond_in_pieces(json_pieces(shown), functools.partial(front.generator.share.turn, caller.tenant))


async def _prompt(
    body: ChatBody, num_bytes: int, rules: FieldRules, call: ApiCall, front: Front, plan: ReplyPlan
) -> Prompt:
    template = front.chat.template
    kwargs = body.template_kwargs(plan, rules)
    encoded = await front.media.chat(
        front.chat,
        plan,
        lambda: [message.to_template(template, rules) for message in body.messages],
        num_bytes,
        namespace=call.caller.namespace(body.cache_salt, body.extra_key),
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=kwargs,
    )
    prediction, most = None, front.generator.info.max_request_tokens
    if body.prediction is not None:
        encode = functools.partial(body.prediction.encode, front.generator.tokenizer, most)
        prediction = await front.generator.beside(encode, num_bytes)
    limit = body.max_new_tokens
    if limit is None:
        limit = default_limit(body, most - len(encoded.input_ids))
    return body.to_prompt(
        call,
        body.response_id("chatcmpl"),
        **encoded.fields,
        plan=plan,
        max_new_tokens=limit,
        is_continued=plan.is_continued,
        return_logprob=bool(body.logprobs),
        top_logprobs_num=body.top_logprobs or 0,
        prediction=prediction,
    )


def default_limit(body: ChatBody, room: int) -> int:
    """The tokens to generate where the client gives no limit: as many as there is room for, and can be scored."""
    if body.logprobs:
        room = min(room, MAX_SCORES // (body.num_answers * (1 + (body.top_logprobs or 0))))
    return max(1, room)
