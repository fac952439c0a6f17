"""What clients send to `/v1/responses`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from jsg.errors import RequestError
from jsg.server.http.body import Body, Checked
from jsg.server.openai.body import MAX_NAME_CHARS, Only
from jsg.types import MAX_TOP_LOGPROBS, SamplingParams

CLIENT_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_output_tokens",
    "sampling_seed": "seed",
    "return_logprob": "top_logprobs",
    "top_logprobs_num": "top_logprobs",
    "input_ids": "input",
    "messages": "input",
}
"""Our name of a field → what clients call it here."""

LOGPROBS = "message.output_text.logprobs"
MAX_ID_CHARS = 128

_NO_TOOLS = "calls of tools are not in this version; leave it out"
_TEXT_ONLY = "models read and write text only in this version; describe it in words"
_NO_THOUGHTS = "thoughts are not told apart from the answer in this version; leave it out"
_CACHED_ANYWAY = "every prefix is cached up to its last token for as long as there is room; leave it out"
_KEPT = "clients send output back as input; a chat template has no place for it"

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
    """A part of a content."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("image_url", "detail", "file_id", "file_data", "file_url", "filename"), _TEXT_ONLY),
        "input_audio": _TEXT_ONLY,
        "refusal": "models of this version do not tell refusals apart; send it as output_text",
        "prompt_cache_breakpoint": _CACHED_ANYWAY,
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {"annotations": _KEPT, "logprobs": _KEPT}

    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputItem(Body):
    """A message, or a reference to one that is stored."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("call_id", "name", "arguments", "output", "action", "server_label"), _NO_TOOLS),
        **dict.fromkeys(("summary", "encrypted_content"), _NO_THOUGHTS),
        "phase": "a chat template knows no phases of an answer; leave it out",
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {"status": _KEPT}

    type: Literal["message", "item_reference"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Checked[ResponsePart] | None = Field(None, description="The parts are put together as they are.")
    id: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="Of a stored message. One whose text differs is read as it is sent."
    )
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @property
    def text(self) -> str:
        """The whole content."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content or ())

    @property
    def is_reference(self) -> bool:
        """Whether it only names a message."""
        return self.type == "item_reference" or (self.type is None and self.role is None and self.content is None)

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        fields = {"id": self.id, "role": self.role, "content": self.content}
        kind, needed, foreign = ("a message", ("role", "content"), ())
        if self.is_reference:
            kind, needed, foreign = ("a reference", ("id",), ("role", "content"))
        for name in needed:
            if fields[name] is None:
                raise RequestError(f"an input item that is {kind} must have {name}, but it is missing; add it", "input")
        for name in foreign:
            if fields[name] is not None:
                raise RequestError(f"an input item that is {kind} must not have {name}; leave it out", "input")
        return self


class TextFormat(Body):
    """`text.format`."""

    REFUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("name", "schema", "description", "strict"), "grammars are not in this version; leave text.format out"
    )

    type: Annotated[Any, Only(("text",), "grammars are not in this version; leave text.format out")]


class TextConfig(Body):
    """`text`."""

    REFUSED: ClassVar[Mapping[str, str]] = {"verbosity": "say it in instructions"}

    format: TextFormat | None = None


class ResponseStreamOptions(Body):
    """`stream_options`."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "include_obfuscation": "false only: events are never padded with random characters"
    }

    include_obfuscation: Annotated[Any, Only((False,), "events are never padded here; leave it out")] = None


class InputTokensBody(Body):
    """What makes a prompt."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "conversation": "name the response to continue in previous_response_id, or send the conversation as input",
        "personality": "say it in instructions",
        "reasoning": _NO_THOUGHTS,
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "parallel_tool_calls": "no tool is ever called",
        "text": '`{"format": {"type": "text"}}` only',
        "tool_choice": '"none" and "auto" only; no tool is ever called',
        "tools": "an empty list only",
        "truncation": '"disabled" only: an input that is too long is refused',
    }

    model: str | None = Field(None, description="The name in `/v1/models`; absent is as good.")
    input: Annotated[str, Field(min_length=1)] | Annotated[Checked[InputItem], Field(min_length=1)]
    instructions: str | None = Field(
        None, description="A system message, for this response only: one that continues it brings its own."
    )
    previous_response_id: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="The stored response of the same key that this one continues."
    )
    text: TextConfig | None = None
    tools: Annotated[Any, Only(([],), _NO_TOOLS)] = None
    tool_choice: Annotated[Any, Only(("none", "auto"), _NO_TOOLS)] = None
    parallel_tool_calls: bool | None = None
    truncation: Annotated[Any, Only(("disabled",), "nothing is left out of an input unasked; shorten it")] = None


class ResponsesBody(InputTokensBody):
    """An input, and how to answer it."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **InputTokensBody.REFUSED,
        "access_programs": "they are another service's; leave it out",
        "context_management": "nothing is left out of a conversation unasked; shorten it before you send it",
        "image": _TEXT_ONLY,
        "moderation": "answers are not moderated here; leave it out",
        "prompt": "no prompts are stored here; send its text as instructions and input",
        "prompt_cache_options": _CACHED_ANYWAY,
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        **InputTokensBody.ACCEPTED,
        "background": "false only; the client waits, or reads a stream",
        "max_tool_calls": "no tool is ever called",
        "prompt_cache_key": "every request of a key finds every prefix of it; cache_salt parts them",
        "prompt_cache_retention": '"in_memory" only',
        "service_tier": '"auto" and "default" only; there is one tier',
    }

    max_output_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="Tokens to generate at most; absent is all that there is room for."
    )
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="-1 and 0 keep all tokens.")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: str | Checked[str] | None = Field(None, description="SGLang's: texts that end the answer.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    include: Checked[Include] | None = Field(
        None, description=f"`{LOGPROBS}`, or what no answer of this version has and so changes nothing."
    )
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="OpenAI's limit is 20.")
    store: bool | None = Field(None, description="Keep the response, which is the default: for a day, if room lasts.")
    metadata: Metadata | None = Field(None, description="Returned with the response.")
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    user: str | None = Field(None, max_length=MAX_NAME_CHARS, description="The end user, for the request log.")
    safety_identifier: str | None = Field(None, max_length=MAX_NAME_CHARS, description="The new name of `user`.")
    cache_salt: str | None = Field(
        None, max_length=MAX_NAME_CHARS, description="Share cached prefixes only with requests of the same salt."
    )
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description="As `cache_salt`; both must be equal.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Larger goes first.")

    background: Annotated[Any, Only((False,), "responses are made while the client waits; leave it out")] = None
    max_tool_calls: int | None = Field(None, ge=0, lt=2**31)
    prompt_cache_key: str | None = Field(None, max_length=MAX_NAME_CHARS)
    prompt_cache_retention: Annotated[Any, Only(("in_memory",), "a prefix stays as long as there is room")] = None
    service_tier: Annotated[Any, Only(("auto", "default"), "there is one tier; leave it out")] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's tokens are scored."""
        return LOGPROBS in (self.include or ())

    def to_sampling(self, max_new_tokens: int) -> SamplingParams:
        """How to choose tokens. Raises RequestError for a value out of range."""
        same = self.model_dump(
            include={
                *("temperature", "top_p", "min_p", "stop"),
                *("presence_penalty", "frequency_penalty", "repetition_penalty"),
            }
        )
        renamed = {"max_new_tokens": max_new_tokens, "sampling_seed": self.seed, "top_k": self.top_k or -1}
        return SamplingParams.from_dict(same | renamed)

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.wants_logprobs:
            raise RequestError(f"top_logprobs needs {LOGPROBS} in include; add it, or leave this out", "top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true; leave it out or stream", "stream_options")
        return self
