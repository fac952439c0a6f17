"""What clients send to `/v1/responses`."""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, ValidationInfo, model_validator

from jsg.errors import RequestError
from jsg.processing.snapshot_points import MOST_POINTS
from jsg.server.http.body import Body, Checked, ClientNames, check_fields
from jsg.server.http.field_rules import FieldRules
from jsg.server.openai.response_format import ENFORCED, FORMAT_TYPE, NOT_SHOWN, SCHEMA, SchemaName
from jsg.server.openai.response_store import Picture, Role
from jsg.server.openai.responses_tools import (
    NO_HOSTED_TOOLS,
    Origin,
    ResponsesTool,
    ResponsesToolChoice,
    arguments_of,
    origins_of,
    without_left_out,
)
from jsg.server.shared.constraint import (
    AdditionalPropertiesOption,
    PropertyOrderOption,
    Schema,
    WhitespaceOption,
    field_of,
    grammar_options,
    only_one,
)
from jsg.server.shared.fields import (
    ALL_THE_ROOM,
    CACHE_SALT,
    END_USER,
    EXTRA_KEY,
    MAX_NAME_CHARS,
    MODEL,
    PRIORITY,
    TOP_LOGPROBS,
    Only,
)
from jsg.server.shared.harmless import VALUES, harmless
from jsg.server.shared.messages import ARGUMENTS, JOINED, ONE_DETAIL, PREFIX_END, URL
from jsg.server.shared.sampling import own_names, sampling_fields, with_sampling
from jsg.server.shared.thinking_fields import BUDGET, EFFORT, Asked
from jsg.server.shared.tools import ONE_CALL, TOOL_CHOICE, TOOLS
from jsg.speech.reply_plan import Constraint, ReplyPlan
from jsg.speech.rules.thinking import Effort, ThoughtWish, unsealed
from jsg.speech.rules.tool_use import MAX_TOOLS, Choice, Speech
from jsg.types import ANY_OBJECT, MAX_TOP_LOGPROBS, SamplingParams

CLIENT_NAMES: Mapping[str, str] = {
    **own_names("responses"),
    "return_logprob": "top_logprobs",
    "top_logprobs_num": "top_logprobs",
    "input_ids": "input",
    "messages": "input",
}
"""Our name of a field → the name in `/v1/responses`."""

LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
MAX_ID_CHARS = 128

_NO_FILES = "models read text and pictures; send a picture as image_url, and anything else as text"
_NO_DRAWING = "models of this version write text only; leave it out"
_NOT_OURS = "another server wrote it, and only that can read it; leave it out"
_NO_SUMMARY = "thoughts are shown as a whole, as `content` of an item of type `reasoning`"
_NOT_HERE = "What only another server can do or read is left out, with a warning: {} of the types {}."
_KEPT = "clients send the output of a response back as input, and chat templates do not read it"

type MetadataKey = Annotated[str, StringConstraints(max_length=64)]
type MetadataValue = Annotated[str, StringConstraints(max_length=512)]
type Metadata = Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)]
type Include = Literal[
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
]


class ResponsePart(Body):
    """A part of the content of a message."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("file_id", "file_data", "file_url", "filename", "input_audio"), _NO_FILES),
        "refusal": "this version does not separate refusals from answers; send it as output_text",
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {"annotations": _KEPT, "logprobs": _KEPT, "detail": ONE_DETAIL}

    type: Literal["input_text", "output_text", "input_image", "reasoning_text", "summary_text"]
    text: str | None = None
    image_url: str | None = Field(None, description=URL)
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: dict[str, Any] | None = Field(
        None, description=f"{PREFIX_END} At a picture it counts at the end of the text before it."
    )
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        check_fields(self, self.type, f"a part of type {self.type}", "input", _PART_FIELDS)
        return self


_PART_FIELDS: Mapping[str, str] = {
    "input_image": "image_url prompt_cache_breakpoint?",
    **dict.fromkeys(("input_text", "output_text"), "text prompt_cache_breakpoint?"),
    **dict.fromkeys(("reasoning_text", "summary_text"), "text"),
}
"""Kind of part → its fields, as `check_fields` reads them."""


class CallFields(Body):
    """The fields of a call of a tool, and of its result."""

    call_id: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="The id that a call and the result of the call share."
    )
    name: str | None = Field(
        None,
        max_length=MAX_ID_CHARS,
        description="The name of the function that is called, or whose result this is. Many chat templates do not show "
        "the name of a result.",
    )
    namespace: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="The namespace of the tool that is called."
    )
    arguments: str | dict[str, Any] | None = Field(
        None, description=f"The arguments of a call of a function. {ARGUMENTS}"
    )
    input: str | None = Field(
        None, description="The input of a call of a custom tool. The chat template gets it as the argument `input`."
    )
    action: dict[str, Any] | None = Field(
        None, description="For the type `local_shell_call`: the chat template gets it as arguments of `local_shell`."
    )
    output: str | Checked[ResponsePart] | None = Field(None, description=f"The result of a call. {JOINED}")


class InputItem(CallFields):
    """A message, thoughts, a call of a tool, the result of a call, or a reference to a stored item."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("server_label", "caller", "async", "created_by"), NO_HOSTED_TOOLS),
    }
    HARMLESS: ClassVar[Mapping[str, str]] = harmless("phase")
    ACCEPTED: ClassVar[Mapping[str, str]] = {"status": _KEPT}

    type: (
        Literal[
            "message",
            "item_reference",
            "reasoning",
            "function_call",
            "function_call_output",
            "custom_tool_call",
            "custom_tool_call_output",
            "local_shell_call",
            "local_shell_call_output",
        ]
        | None
    ) = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Checked[ResponsePart] | None = Field(
        None, description=f"The content of a message, or the thoughts before it. {JOINED}"
    )
    id: str | None = Field(
        None,
        max_length=MAX_ID_CHARS,
        description="The id of a stored item. If the text of this item differs from the stored one, this text is read.",
    )
    encrypted_content: str | None = Field(
        None,
        description="For the type `reasoning`: what stood there in the response. It is read where `content` is "
        "missing. That of another server brings a warning.",
    )
    summary: Checked[ResponsePart] | None = Field(
        None, description="For the type `reasoning`: it is read where nothing else says the thoughts."
    )
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @property
    def text(self) -> str:
        """The content without pictures, the arguments of a call, the result of a call, or thoughts, as one text."""
        if self.is_thought:
            own = None if self.encrypted_content is None else unsealed(self.encrypted_content)
            return _joined(self.content) or own or "\n\n".join(part.text or "" for part in self.summary or ())
        if self.input is not None:
            return arguments_of(self.input)
        if isinstance(called := self.arguments if self.action is None else self.action, dict):
            return json.dumps(called, ensure_ascii=False)
        said = self.content if called is None else called
        return _joined(said if self.output is None else self.output)

    @property
    def pictures(self) -> tuple[Picture, ...]:
        """The pictures in the content."""
        found: list[Picture] = []
        place = 0
        for part in _parts(self.content):
            if part.image_url is not None:
                found.append(Picture(place, part.image_url))
            place += len(part.text or "")
        return tuple(found)

    @property
    def places(self) -> tuple[int, ...]:
        """Where others are likely to go on, in characters of the text: the ends of the last parts that say so."""
        parts = _parts(self.content if self.output is None else self.output)
        ends = itertools.accumulate(len(part.text or "") for part in parts)
        return tuple(end for end, part in zip(ends, parts, strict=True) if part.prompt_cache_breakpoint is not None)[
            -MOST_POINTS:
        ]

    @property
    def speaker(self) -> Role | None:
        """The role of the turn; None for a reference."""
        kind = self.type or ""
        if kind == "reasoning" or kind.endswith("_call"):
            return "assistant"
        return "tool" if kind.endswith("_call_output") else self.role

    @property
    def called(self) -> Literal["function", "custom_tool", "local_shell"]:
        """What kind of tool is called, or has this result."""
        kind = (self.type or "").removesuffix("_output").removesuffix("_call")
        return kind if kind in ("custom_tool", "local_shell") else "function"

    @property
    def is_thought(self) -> bool:
        """Whether it has thoughts of the assistant. They belong to the message or the calls behind them."""
        return self.type == "reasoning"

    @property
    def is_reference(self) -> bool:
        """Whether it only refers to a stored item."""
        return self.type == "item_reference" or (self.type is None and self.role is None and self.content is None)

    @model_validator(mode="after")
    def _check_kind(self, info: ValidationInfo) -> Self:
        kind = "item_reference" if self.is_reference else self.type or "message"
        check_fields(self, kind, f"an input item of type {kind}", "input", _ITEM_FIELDS)
        if self.called == "local_shell" and not (self.call_id or self.id):
            raise RequestError(f"an input item of type {kind} must have call_id, but it is missing; add it", "input")
        if self.role == "assistant" and self.pictures:
            raise RequestError(
                "a message of the assistant must be text, but it has a picture; send the picture in a message of the "
                "user",
                "input",
            )
        if isinstance(self.output, list) and any(part.image_url is not None for part in self.output):
            raise RequestError(
                "the result of a call must be text, but it has a picture; send the picture in a message of the user",
                "input",
            )
        for part in (*_parts(self.content), *_parts(self.output), *_parts(self.summary)):
            if (part.type in ("reasoning_text", "summary_text")) != self.is_thought:
                raise RequestError(
                    f"an input item of type {kind} must not have a part of type {part.type}; correct one of the types",
                    "input",
                )
        if self.encrypted_content and not self.text:
            FieldRules.of(info.context).pass_over("encrypted_content", _NOT_OURS)
        return self


_ITEM_FIELDS: Mapping[str, str] = {
    "message": "role content id?",
    "item_reference": "id",
    "function_call": "call_id name arguments namespace? id?",
    "function_call_output": "call_id output name? id?",
    "custom_tool_call": "call_id name input namespace? id?",
    "custom_tool_call_output": "call_id output name? id?",
    "local_shell_call": "action call_id? id?",
    "local_shell_call_output": "output call_id? id?",
    "reasoning": "summary? content? encrypted_content? id?",
}
"""Kind of item → its fields, as `check_fields` reads them."""


def _parts(content: str | list[ResponsePart] | None) -> list[ResponsePart]:
    return [] if content is None or isinstance(content, str) else content


def _joined(content: str | list[ResponsePart] | None) -> str:
    return content if isinstance(content, str) else "".join(part.text or "" for part in _parts(content))


class TextFormat(Body):
    """The form of the answer's text."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {"name": NOT_SHOWN, "description": NOT_SHOWN, "strict": ENFORCED}

    type: Literal["text", "json_object", "json_schema"] = Field(description=FORMAT_TYPE)
    name: SchemaName | None = None
    schema_: Schema | None = Field(None, alias="schema", description=SCHEMA)
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        kinds = {"text": "", "json_object": "", "json_schema": "name schema_ description? strict?"}
        check_fields(self, self.type, f"text.format of type {self.type}", "text.format", kinds)
        return self

    def constraints(self) -> Iterator[Constraint]:
        """Its grammar, if its type has one."""
        if self.type != "text":
            value = ANY_OBJECT if self.schema_ is None else self.schema_
            yield Constraint("text.format", "json_schema", value)


class TextConfig(Body):
    """The options of the answer's text."""

    HARMLESS: ClassVar[Mapping[str, str]] = harmless("verbosity")

    format: TextFormat | None = None


class ResponseStreamOptions(Body):
    """The options of a stream."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "include_obfuscation": "only false is taken, because events are never padded with random characters"
    }

    include_obfuscation: Annotated[Any, Only((False,), "events are never padded; leave it out")] = None


class ReasoningConfig(Body):
    """How much the model thinks, and what is shown of its thoughts."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("summary", "generate_summary"), _NO_SUMMARY),
        "context": "the chat template decides which thoughts of earlier turns the model sees; other values than "
        '"auto" bring a warning',
        "mode": 'there is one mode; "pro" brings a warning',
    }

    effort: Effort | None = Field(None, description=EFFORT)
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Annotated[
        Any, Only(("auto",), "the chat template decides which thoughts the model sees; leave it out", VALUES["context"])
    ] = None
    mode: Annotated[Any, Only(("standard",), "there is one mode; leave it out", VALUES["mode"])] = None


class InputTokensBody(Body):
    """The fields that make up a prompt."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "conversation": "name the response to continue in previous_response_id, or send the conversation as input",
        "personality": "ask for it in instructions",
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "truncation": 'the server refuses an input that is too long; "auto" brings a warning',
    }

    model: str | None = Field(None, description=MODEL)
    input: Annotated[str, Field(min_length=1)] | Annotated[Checked[InputItem], Field(min_length=1)] = Field(
        description="A text, which is a message of the user, or a list of items. "
        + _NOT_HERE.format("items", "`web_search_call`, `image_generation_call`, `tool_search_call` and `compaction`")
    )
    instructions: str | None = Field(
        None, description="A system message for this response only. A response that continues it has its own."
    )
    previous_response_id: str | None = Field(
        None,
        max_length=MAX_ID_CHARS,
        description="The id of a stored response of the same API key, which this response continues.",
    )
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: Annotated[Checked[ResponsesTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description=f"{TOOLS} {_NOT_HERE.format('tools', '`web_search`, `image_generation` and `tool_search`')}"
    )
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = Field(None, description=TOOL_CHOICE)
    parallel_tool_calls: bool | None = Field(None, description=ONE_CALL)
    truncation: Annotated[
        Any, Only(("disabled",), "the server never shortens an input; shorten it yourself", VALUES["truncation"])
    ] = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any, info: ValidationInfo) -> Any:
        """Drops tools and items that only another server can run or read, with a warning for each kind."""
        lists = [name for name in ("tools", "input") if isinstance(data, dict) and isinstance(data.get(name), list)]
        return {**data, **{name: without_left_out(data[name], info) for name in lists}} if lists else data

    def thought_wish(self) -> ThoughtWish:
        """What the client wants of thoughts."""
        return ThoughtWish(effort=None if self.reasoning is None else self.reasoning.effort)

    @property
    def asked_of_thoughts(self) -> dict[str, Asked]:
        """The field that asks for something of thoughts, if there is one."""
        asked = self.reasoning
        if asked is None or not (asked.effort or asked.summary or asked.generate_summary):
            return {}
        return {"reasoning": Asked(ThoughtWish(effort=asked.effort), is_met=asked.effort is None)}

    def constraint(self) -> Constraint | None:
        """The grammar that the answer must match."""
        form = None if self.text is None else self.text.format
        return None if form is None else only_one(form.constraints())

    @property
    def origins(self) -> dict[str, Origin]:
        """Name by which the model calls a tool → the tool of the client."""
        return origins_of(self.tools or ())[0]

    def plan(self, speech: Speech) -> ReplyPlan:
        """How the answer is asked for and read. Raises RequestError."""
        chosen = self.tool_choice
        origins, tools = origins_of(self.tools or ())
        choice = chosen.choice(origins) if isinstance(chosen, ResponsesToolChoice) else Choice(chosen or "auto")
        is_one_call = choice.is_one_call or self.parallel_tool_calls is False
        choice = dataclasses.replace(choice, is_one_call=is_one_call)
        plan = ReplyPlan(speech, self.thought_wish(), self.constraint(), grammar_options(self))
        return plan.with_tools(tools, choice)

    def client_names(self) -> ClientNames:
        """As `Body.client_names`."""
        params = {"text": "input", "max_new_tokens": "input"}
        return ClientNames(CLIENT_NAMES, params, field_of(self.constraint()))


class ResponsesBody(with_sampling(InputTokensBody, "responses")):
    """An input and the parameters of its answer."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **InputTokensBody.REFUSED,
        "access_programs": "it belongs to another service; leave it out",
        "background_options": "the client waits for a response or reads its stream; leave it out",
        "context_management": "the server never shortens a conversation; shorten it before you send it",
        "image": _NO_DRAWING,
        "moderation": "the server does not moderate answers; leave it out",
        "prompt": "the server stores no prompts; send the text of the prompt as instructions and input",
    }
    HARMLESS: ClassVar[Mapping[str, str]] = harmless("prompt_cache_options")
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        **InputTokensBody.ACCEPTED,
        "background": "only false is taken, because the client waits for a response or reads its stream",
        "client_metadata": "it says which client and which turn sends the request, and no answer depends on it",
        "max_tool_calls": "it limits the calls of tools that a server runs, and this server runs none",
        "prompt_cache_key": "all requests of an API key share its cached prefixes; cache_salt separates them",
        "prompt_cache_retention": 'a prefix stays in memory while there is room; other values than "in_memory" bring a '
        "warning",
        "service_tier": "there is one tier; the name of another one brings a warning",
    }

    max_output_tokens: int | None = Field(
        None, ge=1, lt=2**31, description=f"The largest number of tokens to generate. {ALL_THE_ROOM}"
    )
    include: Checked[Include] | None = Field(
        None,
        description=f"`{LOGPROBS}` adds log-probabilities, and `{SEALED}` adds the thoughts in base64 as "
        "`encrypted_content`, for clients that send only this back. It hides nothing. The other values change nothing, "
        "because no answer of this version has these parts.",
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description=TOP_LOGPROBS)
    thinking_budget: int | None = Field(None, ge=-1, lt=2**31, description=BUDGET)
    store: bool | None = Field(
        None, description="Store the response. The default is true. It is kept for a day if there is enough room."
    )
    metadata: Metadata | None = Field(None, description="Texts that the response repeats.")
    stream: bool | None = Field(None, description="Answer with events.")
    stream_options: ResponseStreamOptions | None = None
    whitespace: WhitespaceOption = None
    property_order: PropertyOrderOption = None
    additional_properties: AdditionalPropertiesOption = None
    user: str | None = Field(None, max_length=MAX_NAME_CHARS, description=END_USER)
    safety_identifier: str | None = Field(None, max_length=MAX_NAME_CHARS, description="The new name of `user`.")
    cache_salt: str | None = Field(None, max_length=MAX_NAME_CHARS, description=CACHE_SALT)
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description=EXTRA_KEY)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description=PRIORITY)

    background: Annotated[
        Any, Only((False,), "the client must wait for a response or read its stream; leave it out")
    ] = None
    client_metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = Field(None, ge=0, lt=2**31)
    prompt_cache_key: str | None = Field(None, max_length=MAX_NAME_CHARS)
    prompt_cache_retention: Annotated[
        Any, Only(("in_memory",), "a prefix stays as long as there is room", VALUES["prompt_cache_retention"])
    ] = None
    service_tier: Annotated[
        Any, Only(("auto", "default"), "there is one tier; leave it out", VALUES["service_tier"])
    ] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are scored."""
        return LOGPROBS in (self.include or ())

    def client_names(self) -> ClientNames:
        """As `Body.client_names`."""
        names = super().client_names()
        return names if self.max_output_tokens is None else dataclasses.replace(names, params={"text": "input"})

    def thought_wish(self) -> ThoughtWish:
        """What the client wants of thoughts."""
        budget = None if self.thinking_budget == -1 else self.thinking_budget
        return dataclasses.replace(super().thought_wish(), budget=budget)

    def to_sampling(self, max_new_tokens: int, plan: ReplyPlan) -> SamplingParams:
        """The sampling parameters. Raises RequestError for a value out of range."""
        fields = sampling_fields(self, "responses") | {"max_new_tokens": max_new_tokens}
        return SamplingParams.from_dict(fields | plan.sampling)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(
                f"top_logprobs needs {LOGPROBS} in include, but it is missing; add it, or leave top_logprobs out",
                "top_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError(
                "stream_options needs stream to be true, but it is not; leave it out, or set stream", "stream_options"
            )
        return self
