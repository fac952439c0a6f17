"""What clients send to Anthropic's `/v1/messages`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from jsg.errors import RequestError
from jsg.parameters import MAX_STOP_CHARS, MAX_STOP_STRINGS
from jsg.server.http.body import GRAMMAR, Body, Checked
from jsg.server.media_sources import MediaSource, joined_content
from jsg.server.shared.constraint import (
    Constraint,
    PropertyOrderOption,
    Schema,
    WhitespaceOption,
    grammar_fields,
    only_one,
)
from jsg.server.shared.fields import MAX_NAME_CHARS, Only
from jsg.server.shared.sampling import own_names, sampling_fields, with_sampling
from jsg.server.shared.tools import STRICT, ToolName
from jsg.server.tool_use import MAX_TOOLS, Choice, Speech, Tool, ToolUse
from jsg.types import SamplingParams

CLIENT_NAMES: Mapping[str, str] = {**own_names("anthropic"), "input_ids": "messages"}
"""Our name of a field → Anthropic's name."""

_NO_SERVER_TOOLS = "the server runs no tools of its own; leave it out"
_NO_FILES = "models read text and pictures; write what is in it into a text"
_NO_THOUGHTS = "thoughts are not told apart from the answer in this version; leave it out"
_CACHED_ANYWAY = "every prefix is cached up to its last token for as long as there is room, so a mark changes nothing"

type StopSequence = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]


class CacheControl(Body):
    """`cache_control`."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    """A block of a content."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "source": "here is text only; send the picture in a message of the user",
        **dict.fromkeys(("title", "context", "file_id"), _NO_FILES),
        "citations": "answers cite nothing in this version; leave it out",
        **dict.fromkeys(("thinking", "signature", "data"), _NO_THOUGHTS),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {"cache_control": _CACHED_ANYWAY}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class ImageSource(Body):
    """Where a picture is."""

    REFUSED: ClassVar[Mapping[str, str]] = {"file_id": "no files are stored here; send the picture itself in base64"}

    type: Literal["base64", "url"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"] | None = Field(
        None, description="With base64; the bytes decide."
    )
    data: str | None = Field(None, description="With base64: the file.")
    url: str | None = Field(None, description="With url: a `data:` URL, or http of a host that the server allows.")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        needed = {"base64": {"media_type", "data"}, "url": {"url"}}[self.type]
        given = {name for name in ("media_type", "data", "url") if getattr(self, name) is not None}
        if given != needed:
            rule = f"a source of type {self.type} must have {' and '.join(sorted(needed))} and nothing else"
            raise RequestError(f"{rule}, but has {' and '.join(sorted(given)) or 'neither'}; correct it", "messages")
        return self

    @property
    def media(self) -> MediaSource:
        """The picture in the form that every API shares."""
        return MediaSource("image", self.data or self.url or "")


class MessageBlock(Body):
    """A block of a turn: words, a picture, a call of a tool, or what came of a call."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **{name: why for name, why in TextBlock.REFUSED.items() if name != "source"},
        "toolset_name": _NO_SERVER_TOOLS,
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "cache_control": _CACHED_ANYWAY,
        "caller": '`{"type": "direct"}` only: who else could it be',
        "is_error": "a chat template has no place for it; the content says what went wrong",
    }

    type: Literal["text", "image", "tool_use", "tool_result"]
    text: str | None = Field(None, description="Of words.")
    source: ImageSource | None = Field(None, description="Of a picture.")
    id: str | None = Field(None, max_length=MAX_NAME_CHARS, description="Of a call.")
    name: str | None = Field(None, max_length=MAX_NAME_CHARS, description="Of the tool that was called.")
    input: dict[str, Any] | None = Field(None, description="Of a call: the arguments.")
    tool_use_id: str | None = Field(None, max_length=MAX_NAME_CHARS, description="Of a result: the call.")
    content: str | Checked[TextBlock] | None = Field(None, description="Of a result; the blocks are put together.")
    cache_control: CacheControl | None = None
    caller: Annotated[Any, Only(({"type": "direct"},), _NO_SERVER_TOOLS)] = None
    is_error: bool | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        needed, taken = {
            "text": ({"text"}, {"text"}),
            "image": ({"source"}, {"source"}),
            "tool_use": ({"id", "name", "input"}, {"id", "name", "input", "caller"}),
            "tool_result": ({"tool_use_id"}, {"tool_use_id", "content", "is_error"}),
        }[self.type]
        given = {name for name in self.model_fields_set if getattr(self, name) is not None}
        for name in sorted(needed - given):
            raise RequestError(f"a block of type {self.type} must have {name}, but it is missing; add it", "messages")
        for name in sorted(given - taken - {"type", "cache_control"}):
            raise RequestError(f"a block of type {self.type} must not have {name}; leave it out", name)
        return self


class AnthropicMessage(Body):
    """One turn, or a part of one: messages of one role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Checked[MessageBlock] = Field(description="The words in it are put together as they are.")

    @model_validator(mode="after")
    def _check_blocks(self) -> Self:
        theirs = {"tool_use": "assistant", "tool_result": "user", "image": "user"}
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

    def turns(self) -> Iterator[tuple[dict[str, Any], list[str | MediaSource]]]:
        """The message in the form of chat templates, with the pieces of its content; each tool result is a message."""
        pieces: list[str | MediaSource] = [self.content] if isinstance(self.content, str) else []
        calls: list[dict[str, Any]] = []
        for block in self.blocks:
            if block.type == "tool_result":
                if any(pieces):
                    yield {"role": self.role}, pieces
                    pieces = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id}, [joined(block.content or "")]
            elif block.type == "tool_use":
                function = {"name": block.name, "arguments": block.input}
                calls.append({"id": block.id, "type": "function", "function": function})
            else:
                pieces.append(block.source.media if block.source is not None else block.text or "")
        has_results = any(block.type == "tool_result" for block in self.blocks)
        if any(pieces) or not has_results:
            yield {"role": self.role} | ({"tool_calls": calls} if calls else {}), pieces


class AnthropicTool(Body):
    """A function that the model may call."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "input_examples": "a chat template has no place for them; write them into the description",
        **dict.fromkeys(("max_uses", "allowed_domains", "blocked_domains", "user_location"), _NO_SERVER_TOOLS),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "cache_control": _CACHED_ANYWAY,
        "allowed_callers": '`["direct"]` only: who else could it be',
        "defer_loading": "false only: the model is shown every tool",
        "eager_input_streaming": "arguments always come as they are made",
    }

    type: Annotated[Any, Only(("custom",), _NO_SERVER_TOOLS)] = None
    name: ToolName
    description: str | None = Field(None, description="Shown to the model.")
    input_schema: dict[str, Any] = Field(description="A JSON Schema of the arguments, shown to the model.")
    strict: bool | None = Field(None, description=STRICT.replace("parameters", "input_schema"))
    cache_control: CacheControl | None = None
    allowed_callers: Annotated[Any, Only((["direct"],), _NO_SERVER_TOOLS)] = None
    defer_loading: Annotated[Any, Only((False,), "the model is shown every tool; leave it out")] = None
    eager_input_streaming: bool | None = None

    def tool(self, field: str) -> Tool:
        """The tool in the form that every API shares. `field` is where the client wrote it."""
        return Tool(self.name, self.description, self.input_schema, f"{field}.input_schema", self.strict is not False)


class AnthropicToolChoice(Body):
    """Which tools to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(None, max_length=MAX_NAME_CHARS, description="With the type `tool`: the one.")
    disable_parallel_tool_use: bool | None = Field(None, description="True: one call at most.")

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        if (self.name is not None) != (self.type == "tool"):
            raise RequestError("tool_choice must have a name where its type is tool, and only there", "tool_choice")
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
    schema_: Schema = Field(alias="schema", description="A JSON Schema, which the answer's text will match.")


class OutputConfig(Body):
    """`output_config`."""

    REFUSED: ClassVar[Mapping[str, str]] = {"effort": "say it in system"}

    format: OutputFormat | None = None


class AnthropicMetadata(Body):
    """`metadata`."""

    user_id: str | None = Field(None, max_length=MAX_NAME_CHARS, description="The end user, for the request log.")


class CountTokensBody(Body):
    """What makes a prompt."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "mcp_servers": _NO_SERVER_TOOLS,
        "context_management": "nothing is left out of a conversation unasked; shorten it before you send it",
        **dict.fromkeys(("user_profile_id", "workspace_id"), "they are another service's; leave it out"),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "cache_control": _CACHED_ANYWAY,
        "speed": '"standard" only; there is one speed',
        "thinking": '`{"type": "disabled"}` only',
    }

    model: str | None = Field(None, description="The name in `/v1/models`; absent is as good.")
    messages: Annotated[Checked[AnthropicMessage], Field(min_length=1)] = Field(
        description="The last one may be the assistant's: the answer goes on in it."
    )
    system: str | Checked[TextBlock] | None = Field(None, description="The blocks are put together as they are.")

    cache_control: CacheControl | None = None
    speed: Annotated[Any, Only(("standard",), "there is one speed; leave it out")] = None
    thinking: Annotated[Any, Only(({"type": "disabled"},), _NO_THOUGHTS)] = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older place of `output_config.format`.")
    tool_choice: AnthropicToolChoice | None = Field(None, description='"auto" is the default.')
    tools: Annotated[Checked[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = Field(
        None, description="What the model may call, if it was made for tools."
    )

    def turns(self) -> list[dict[str, Any]]:
        """The conversation as chat templates know it, in turns of alternating roles.

        What an assistant said in several messages goes on where it was cut; other messages are put apart by an empty
        line. After a call of a tool a turn is over.
        """
        turns: list[dict[str, Any]] = []
        pieces: list[list[str | MediaSource]] = []  # of each turn, which are joined once
        if self.system is not None:
            turns.append({"role": "system"})
            pieces.append([joined(self.system)])
        for message in self.messages:
            for turn, own in message.turns():
                role = turn["role"]
                if turns and role != "tool" and turns[-1]["role"] == role and "tool_calls" not in turns[-1]:
                    turns[-1] |= turn
                    pieces[-1] += ["" if role == "assistant" else "\n\n", *own]
                else:
                    turns.append(turn)
                    pieces.append(own)
        return [turn | {"content": joined_content(own)} for turn, own in zip(turns, pieces, strict=True)]

    def constraint(self) -> Constraint | None:
        """The grammar that the answer must match. Raises RequestError where two are given."""
        configured = None if self.output_config is None else self.output_config.format
        given = {"output_config.format": configured, "output_format": self.output_format}
        return only_one(
            Constraint(field, "json_schema", form.schema_) for field, form in given.items() if form is not None
        )

    def tool_use(self, speech: Speech) -> ToolUse | None:
        """The tools that the answer may call; None for none. Raises RequestError."""
        choice = Choice() if self.tool_choice is None else self.tool_choice.choice()
        tools = [tool.tool(f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
        return ToolUse.of(tools, choice, speech)

    def client_names(self) -> dict[str, str]:
        """Our name of a field → the client's name."""
        constraint = self.constraint()
        field = constraint.field if constraint is not None else "tools"
        return {**CLIENT_NAMES, GRAMMAR: field}

    @property
    def is_continued(self) -> bool:
        """Whether the answer goes on in the last message."""
        return self.messages[-1].role == "assistant"


class MessagesBody(with_sampling(CountTokensBody, "anthropic")):
    """A conversation, and how to go on in it."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **CountTokensBody.REFUSED,
        "container": _NO_SERVER_TOOLS,
        "diagnostics": "/generate tells with return_cache_info why a prefix was not cached",
        "inference_geo": "answers are made where the server runs; leave it out",
        **dict.fromkeys(
            ("thread", "compaction", "fallbacks", "fallback_credit_token", "billing_policy"),
            "it is another service's; leave it out",
        ),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        **CountTokensBody.ACCEPTED,
        "service_tier": '"auto" and "standard_only" only; there is one tier',
    }

    max_tokens: int = Field(ge=0, lt=2**31, description="Tokens to generate at most; 0 only fills the cache.")
    stop_sequences: Annotated[Checked[StopSequence], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    metadata: AnthropicMetadata | None = None
    cache_salt: str | None = Field(
        None, max_length=MAX_NAME_CHARS, description="Share cached prefixes only with requests of the same salt."
    )
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description="As `cache_salt`; both must be equal.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Larger goes first.")
    whitespace: WhitespaceOption = None
    property_order: PropertyOrderOption = None

    service_tier: Annotated[Any, Only(("auto", "standard_only"), "there is one tier; leave it out")] = None

    @property
    def user(self) -> str | None:
        """The end user."""
        return None if self.metadata is None else self.metadata.user_id

    def to_sampling(self, tools: ToolUse | None) -> SamplingParams:
        """How to choose tokens and when to stop. Raises RequestError for a value out of range."""
        options = {"whitespace": self.whitespace, "property_order": self.property_order}
        grammar = grammar_fields(self.constraint(), tools, options)
        return SamplingParams.from_dict(sampling_fields(self, "anthropic") | grammar)


def joined(content: str | list[TextBlock]) -> str:
    """A content as one text."""
    return content if isinstance(content, str) else "".join(block.text for block in content)
