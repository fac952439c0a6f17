"""What clients send to Anthropic's `/v1/messages`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, ValidationInfo, model_validator

from jsg.errors import RequestError
from jsg.parameters import MAX_STOP_CHARS, MAX_STOP_STRINGS
from jsg.processing.snapshot_points import PlacedText, joined_text
from jsg.server.http.body import Body, Checked, ClientNames, check_fields
from jsg.server.http.field_rules import FieldRules
from jsg.server.media_sources import MediaSource, joined_content
from jsg.server.shared.constraint import (
    AdditionalPropertiesOption,
    PropertyOrderOption,
    Schema,
    WhitespaceOption,
    field_of,
    grammar_options,
    only_one,
)
from jsg.server.shared.fields import CACHE_SALT, END_USER, EXTRA_KEY, MAX_NAME_CHARS, MODEL, PRIORITY, Only
from jsg.server.shared.harmless import VALUES
from jsg.server.shared.messages import ARGUMENTS, PREFIX_END, arguments_for_template
from jsg.server.shared.sampling import own_names, sampling_fields, with_sampling
from jsg.server.shared.thinking_fields import EFFORT, Asked, Thinking, join_wishes
from jsg.server.shared.tools import DESCRIPTION, STRICT, TOOLS, ToolName
from jsg.speech.reply_plan import Constraint, ReplyPlan
from jsg.speech.rules.thinking import Effort, ThoughtWish, unsealed
from jsg.speech.rules.tool_use import MAX_TOOLS, Choice, Speech, Tool
from jsg.types import SamplingParams

CLIENT_NAMES: Mapping[str, str] = {
    **own_names("anthropic"),
    "input_ids": "messages",
    "reasoning_effort": "output_config.effort",
}
"""Our name of a field → Anthropic's name."""

_NO_SERVER_TOOLS = "the server runs no tools; leave it out"
_NO_FILES = "models read text and pictures only; send the content as text"
_OF_DOCUMENTS: Mapping[str, str] = {
    **dict.fromkeys(("title", "context", "file_id"), _NO_FILES),
    "citations": "answers of this version have no citations; leave it out",
}
_NO_CALLERS = "because only the model calls tools"
_NO_THREADS = "the server keeps no threads; send the whole conversation without it"
_NOT_HERE = "thoughts belong in a message of the assistant; leave it out"
_NOT_OURS = "another server wrote it, and only that can read it; leave it out"
_NOT_SHORTENED = "the server never shortens a conversation; shorten it before you send it"
_JOINED = "A text, or a list of blocks, whose texts are joined without anything between them."

type StopSequence = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]


class CacheControl(Body):
    """A mark for the cache of prompts."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """A block of text."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "source": "only text is allowed here; send the picture in a message of the user",
        **_OF_DOCUMENTS,
        **dict.fromkeys(("thinking", "signature", "data"), _NOT_HERE),
    }

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = Field(None, description=PREFIX_END)


class ImageSource(Body):
    """The source of a picture."""

    REFUSED: ClassVar[Mapping[str, str]] = {"file_id": "the server stores no files; send the picture in base64"}

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = Field(
        None, description="For the type `base64`: the media type. The bytes of the file decide which type it has."
    )
    data: str | None = Field(None, description="For the type `base64`: the file of the picture in base64.")
    url: str | None = Field(
        None, description="For the type `url`: a `data:` URL, or an http URL of a host that the server allows."
    )

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        kinds = {"base64": "media_type data", "url": "url"}
        check_fields(self, self.type, f"a source of type {self.type}", "messages", kinds)
        return self

    @property
    def media(self) -> MediaSource:
        """The picture in the form that every API shares."""
        return MediaSource("image", self.data or self.url or "")


class ThoughtFields(Body):
    """The fields of a block of thoughts."""

    thinking: str | None = Field(
        None,
        description="For the type `thinking`: thoughts of an earlier answer. The chat template keeps them or drops "
        "them. Where it does not read them, this brings a warning.",
    )
    signature: str | None = Field(
        None,
        description="For the type `thinking`: what stood in this block. That of another server is taken too. In a "
        "block whose thoughts were omitted it has them.",
    )
    data: str | None = Field(
        None,
        description="For the type `redacted_thinking`: thoughts that only the server that wrote them can read. Those "
        "of another server bring a warning.",
    )

    @property
    def thoughts(self) -> str:
        """The thoughts in it; empty where it has none that this server can read."""
        return self.thinking or unsealed(self.signature or self.data or "") or ""


class MessageBlock(ThoughtFields):
    """A block of a message: a text, a picture, thoughts, a call of a tool, or the result of a call."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **_OF_DOCUMENTS,
        "toolset_name": _NO_SERVER_TOOLS,
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "caller": f'only `{{"type": "direct"}}` is taken, {_NO_CALLERS}',
        "is_error": "chat templates do not read it; the content says what went wrong",
    }

    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = Field(None, description="For the type `text`: the text.")
    source: ImageSource | None = Field(None, description="For the type `image`: the picture.")
    id: str | None = Field(None, max_length=MAX_NAME_CHARS, description="For the type `tool_use`: the id of the call.")
    name: str | None = Field(
        None, max_length=MAX_NAME_CHARS, description="For the type `tool_use`: the name of the tool."
    )
    input: dict[str, Any] | str | None = Field(None, description=f"For the type `tool_use`: the arguments. {ARGUMENTS}")
    tool_use_id: str | None = Field(
        None, max_length=MAX_NAME_CHARS, description="For the type `tool_result`: the id of the call."
    )
    content: str | Checked[TextBlock] | None = Field(
        None, description=f"For the type `tool_result`: the result. {_JOINED}"
    )
    cache_control: CacheControl | None = Field(
        None, description=f"{PREFIX_END} At thoughts, a picture or a call it counts at the end of the text before it."
    )
    caller: Annotated[Any, Only(({"type": "direct"},), _NO_SERVER_TOOLS)] = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _check_type(self, info: ValidationInfo) -> Self:
        kinds = {
            "text": "text",
            "image": "source",
            "tool_use": "id name input caller?",
            "tool_result": "tool_use_id content? is_error?",
            "thinking": "thinking signature?",
            "redacted_thinking": "data",
        }
        check_fields(self, self.type, f"a block of type {self.type}", "messages", kinds)
        if self.data is not None and unsealed(self.data) is None:
            FieldRules.of(info.context).pass_over(f"a block of type {self.type}", _NOT_OURS)
        return self


class AnthropicMessage(Body):
    """A message of a conversation. Messages of one role in a row become one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Checked[MessageBlock] = Field(description=_JOINED)

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        theirs = {"tool_result": "user", "image": "user"}
        theirs |= dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant")
        for block in self.blocks:
            if theirs.get(block.type, self.role) != self.role:
                hint = "send the picture in a message of the user" if block.type == "image" else "correct its role"
                rule = f"a message of role {self.role} must not have a block of type {block.type}"
                raise RequestError(f"{rule}; {hint}", "messages")
        return self

    @property
    def blocks(self) -> list[MessageBlock]:
        """The content, where it is made of blocks."""
        return [] if isinstance(self.content, str) else self.content

    def turns(self, rules: FieldRules) -> Iterator[tuple[dict[str, Any], list[str | MediaSource]]]:
        """The message in the form of chat templates, with the pieces of its content; each tool result is a message.

        Thoughts are those of the whole message, wherever they stand in it. The rules take note of arguments that are no
        object.
        """
        pieces: list[str | MediaSource] = [self.content] if isinstance(self.content, str) else []
        calls: list[dict[str, Any]] = []
        thoughts: list[str] = []
        for block in self.blocks:
            end = [PlacedText()] * (block.cache_control is not None)
            if block.type == "tool_result":
                if any(pieces):
                    yield {"role": self.role}, pieces
                    pieces = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id}, [joined(block.content or ""), *end]
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": arguments_for_template(block.input or {}, rules)}
                calls.append({"id": block.id, "type": "function", "function": function})
            elif block.thoughts:
                thoughts.append(block.thoughts)
            else:
                pieces.append(block.source.media if block.source is not None else block.text or "")
            pieces += end if block.type != "tool_result" else []
        has_results = any(block.type == "tool_result" for block in self.blocks)
        if any(pieces) or not has_results:
            turn: dict[str, Any] = {"role": self.role} | ({"tool_calls": calls} if calls else {})
            yield turn | ({"reasoning_content": "\n\n".join(thoughts)} if thoughts else {}), pieces


class AnthropicTool(Body):
    """A function that the model may call."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "input_examples": "chat templates do not read it; write the examples into the description",
        **dict.fromkeys(("max_uses", "allowed_domains", "blocked_domains", "user_location"), _NO_SERVER_TOOLS),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "allowed_callers": f'only `["direct"]` is taken, {_NO_CALLERS}',
        "defer_loading": "only false is taken, because the model sees every tool",
        "eager_input_streaming": "a stream always sends arguments as they are generated",
    }

    type: Annotated[Any, Only(("custom",), _NO_SERVER_TOOLS)] = None
    name: ToolName
    description: str | None = Field(None, description=DESCRIPTION)
    input_schema: dict[str, Any] = Field(description="A JSON Schema of the arguments, which is shown to the model.")
    strict: bool | None = Field(None, description=STRICT.replace("parameters", "input_schema"))
    cache_control: CacheControl | None = Field(
        None, description=f"{PREFIX_END} At a tool it counts behind all tools and the system message."
    )
    allowed_callers: Annotated[Any, Only((["direct"],), _NO_SERVER_TOOLS)] = None
    defer_loading: Annotated[Any, Only((False,), "the model sees every tool; leave it out")] = None
    eager_input_streaming: bool | None = None

    def tool(self, field: str) -> Tool:
        """The tool in the form that every API shares. `field` is where the client wrote it."""
        return Tool(self.name, self.description, self.input_schema, f"{field}.input_schema", self.strict is not False)


class AnthropicToolChoice(Body):
    """The choice of the tools that the answer may call."""

    type: Literal["auto", "any", "tool", "none"] = Field(
        description='With "auto" the answer is text or calls, with "any" it has at least one call, with "tool" it is '
        'one call of the tool `name`, and with "none" it is text.'
    )
    name: str | None = Field(
        None, max_length=MAX_NAME_CHARS, description="For the type `tool`: the name of the tool that is called."
    )
    disable_parallel_tool_use: bool | None = Field(None, description="If it is true, an answer has at most one call.")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        kinds = {"auto": "", "any": "", "tool": "name", "none": ""}
        check_fields(self, self.type, f"tool_choice of type {self.type}", "tool_choice", kinds)
        return self

    def choice(self) -> Choice:
        """The choice in the form that every API shares."""
        is_one_call = bool(self.disable_parallel_tool_use) or self.name is not None
        names = None if self.name is None else (self.name,)
        match self.type:
            case "any" | "tool":
                return Choice("required", names, is_one_call=is_one_call)
            case "auto" | "none":
                return Choice(self.type, is_one_call=is_one_call)


class OutputFormat(Body):
    """The form of the answer."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema", description="A JSON Schema, which the text of the answer matches.")


class OutputConfig(Body):
    """The options of the answer."""

    format: OutputFormat | None = None
    effort: Effort | None = Field(None, description=EFFORT)


class AnthropicMetadata(Body):
    """The description of the request."""

    user_id: str | None = Field(None, max_length=MAX_NAME_CHARS, description=END_USER)


class CountTokensBody(Body):
    """The fields that make up a prompt."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "mcp_servers": _NO_SERVER_TOOLS,
        **dict.fromkeys(("user_profile_id", "workspace_id"), "it belongs to another service; leave it out"),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "cache_control": "a model whose layers keep states keeps one at the end of each prompt anyway",
        "speed": 'there is one speed; "fast" brings a warning',
        "context_management": "only the clearing of thoughts is taken, with a warning, because the chat template "
        "decides which thoughts of earlier turns the model sees",
    }

    model: str | None = Field(None, description=MODEL)
    messages: Annotated[Checked[AnthropicMessage], Field(min_length=1)] = Field(
        description="The conversation. If the last message is the assistant's, the answer continues it."
    )
    system: str | Checked[TextBlock] | None = Field(None, description=f"The system message. {_JOINED}")

    cache_control: CacheControl | None = None
    speed: Annotated[Any, Only(("standard",), "there is one speed; leave it out", VALUES["speed"])] = None
    thinking: Thinking | None = None
    context_management: Annotated[Any, Only(({"edits": []},), _NOT_SHORTENED, VALUES["context_management"])] = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of `output_config.format`.")
    tool_choice: AnthropicToolChoice | None = Field(
        None, description='The choice of the tools that the answer may call. The default is "auto".'
    )
    tools: Annotated[Checked[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = Field(None, description=TOOLS)

    def turns(self, rules: FieldRules) -> list[dict[str, Any]]:
        """The conversation in the form of chat templates, in turns of alternating roles.

        Several messages of an assistant in a row are joined without anything between them, and messages of other roles
        with an empty line between them. A call of a tool ends a turn. The rules take note of
        arguments that are no object.
        """
        turns: list[dict[str, Any]] = []
        pieces: list[list[str | MediaSource]] = []  # the pieces of each turn, which are joined once, at the end
        if self.system is not None:
            turns.append({"role": "system"})
            pieces.append([joined(self.system)])
        for message in self.messages:
            for turn, own in message.turns(rules):
                role = turn["role"]
                if turns and role != "tool" and turns[-1]["role"] == role and "tool_calls" not in turns[-1]:
                    turns[-1] |= turn | joined_thoughts(turns[-1], turn)
                    pieces[-1] += ["" if role == "assistant" else "\n\n", *own]
                else:
                    turns.append(turn)
                    pieces.append(own)
        if any(tool.cache_control is not None for tool in self.tools or ()):
            own = next((own for turn, own in zip(turns, pieces, strict=True) if turn["role"] != "system"), [])
            own.insert(0, PlacedText())
        return [turn | {"content": joined_content(own)} for turn, own in zip(turns, pieces, strict=True)]

    def constraint(self) -> Constraint | None:
        """The grammar that the answer must match. Raises RequestError if two are given."""
        configured = None if self.output_config is None else self.output_config.format
        given = {"output_config.format": configured, "output_format": self.output_format}
        return only_one(
            Constraint(field, "json_schema", form.schema_) for field, form in given.items() if form is not None
        )

    def plan(self, speech: Speech) -> ReplyPlan:
        """How the answer is asked for and read. Raises RequestError."""
        choice = Choice() if self.tool_choice is None else self.tool_choice.choice()
        tools = [tool.tool(f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
        plan = ReplyPlan(
            speech, self.thought_wish(), self.constraint(), grammar_options(self), is_continued=self.is_continued
        )
        return plan.with_tools(tools, choice)

    def thought_wish(self) -> ThoughtWish:
        """What the client wants of thoughts: without `thinking` they are not shown."""
        effort = None if self.output_config is None else self.output_config.effort
        wish = ThoughtWish(is_shown=False) if self.thinking is None else self.thinking.wish
        return join_wishes([wish, ThoughtWish(effort=effort)])

    @property
    def asked_of_thoughts(self) -> dict[str, Asked]:
        """Fields that ask for something of thoughts."""
        asked = {} if self.thinking is None else {"thinking": self.thinking.asked}
        effort = None if self.output_config is None else self.output_config.effort
        return asked if effort is None else asked | {"output_config.effort": Asked(ThoughtWish(effort=effort))}

    def client_names(self) -> ClientNames:
        """As `Body.client_names`."""
        return ClientNames(CLIENT_NAMES, {"text": "messages"}, field_of(self.constraint()))

    @property
    def is_continued(self) -> bool:
        """Whether the answer goes on in the last message."""
        return self.messages[-1].role == "assistant"


class MessagesBody(with_sampling(CountTokensBody, "anthropic")):
    """A conversation and the parameters of its answer."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **CountTokensBody.REFUSED,
        "container": _NO_SERVER_TOOLS,
        "diagnostics": "use return_cache_info of /generate to see why a prefix was not cached",
        "inference_geo": "the server runs in one place only; leave it out",
        **dict.fromkeys(
            ("compaction", "fallbacks", "fallback_credit_token", "billing_policy"),
            "it belongs to another service; leave it out",
        ),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        **CountTokensBody.ACCEPTED,
        "service_tier": 'only "auto" and "standard_only" are taken, because there is one tier',
        "thread": 'only `{"type": "create"}` is taken, with a warning, because the server keeps no threads; others are '
        "refused with `details.error_code`, by which Anthropic's clients send the whole conversation instead",
    }

    max_tokens: int = Field(
        ge=0, lt=2**31, description="The largest number of tokens to generate. With 0 the prompt is only cached."
    )
    stop_sequences: Annotated[Checked[StopSequence], Field(max_length=MAX_STOP_STRINGS)] | None = Field(
        None, description="Texts that end the answer. They are cut off."
    )
    stream: bool | None = Field(None, description="Answer with events.")
    metadata: AnthropicMetadata | None = None
    cache_salt: str | None = Field(None, max_length=MAX_NAME_CHARS, description=CACHE_SALT)
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description=EXTRA_KEY)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description=PRIORITY)
    whitespace: WhitespaceOption = None
    property_order: PropertyOrderOption = None
    additional_properties: AdditionalPropertiesOption = None

    service_tier: Annotated[Any, Only(("auto", "standard_only"), "there is one tier; leave it out")] = None
    thread: Annotated[Any, Only((), _NO_THREADS, VALUES["thread"])] = None

    @property
    def user(self) -> str | None:
        """The end user."""
        return None if self.metadata is None else self.metadata.user_id

    def to_sampling(self, plan: ReplyPlan) -> SamplingParams:
        """How to choose tokens and when to stop. Raises RequestError for a value out of range."""
        return SamplingParams.from_dict(sampling_fields(self, "anthropic") | plan.sampling)

    @property
    def thought_display(self) -> Literal["summarized", "omitted"] | None:
        """How blocks of thoughts are shown; None for no such blocks."""
        if self.thinking is None or self.thinking.type == "disabled":
            return None
        return self.thinking.display or "summarized"

    @model_validator(mode="after")
    def _check_budget(self) -> Self:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and 0 < self.max_tokens <= budget:
            raise RequestError(
                f"thinking.budget_tokens must be less than max_tokens, which counts thoughts and answer together, but "
                f"they are {budget} and {self.max_tokens}; lower the budget, or raise max_tokens",
                "thinking",
            )
        return self


def joined_thoughts(*turns: Mapping[str, Any]) -> dict[str, str]:
    """The thoughts of several turns that become one; nothing where none has any."""
    found = [turn["reasoning_content"] for turn in turns if "reasoning_content" in turn]
    return {"reasoning_content": "\n\n".join(found)} if found else {}


def joined(content: str | list[TextBlock]) -> str:
    """A content as one text."""
    if isinstance(content, str):
        return content
    return joined_text([PlacedText(each.text) if each.cache_control is not None else each.text for each in content])
