"""What clients send to Anthropic's `/v1/messages`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from jsg.server.http.body import Body, Checked
from jsg.server.openai.body import MAX_NAME_CHARS, Only
from jsg.types import MAX_STOP_CHARS, MAX_STOP_STRINGS, SamplingParams

CLIENT_NAMES: Mapping[str, str] = {
    "max_new_tokens": "max_tokens",
    "sampling_seed": "seed",
    "input_ids": "messages",
    "stop": "stop_sequences",
}
"""Our name of a field → what clients call it here."""

_NO_TOOLS = "calls of tools are not in this version; leave it out"
_TEXT_ONLY = "models read text only in this version; describe it in words"
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
        **dict.fromkeys(("source", "title", "context", "file_id"), _TEXT_ONLY),
        "citations": "answers cite nothing in this version; leave it out",
        **dict.fromkeys(("id", "name", "input", "caller", "tool_use_id", "content", "is_error"), _NO_TOOLS),
        **dict.fromkeys(("thinking", "signature", "data"), _NO_THOUGHTS),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {"cache_control": _CACHED_ANYWAY}

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class AnthropicMessage(Body):
    """One turn, or a part of one: messages of one role in a row are one turn."""

    role: Literal["user", "assistant", "system"]
    content: str | Checked[TextBlock] = Field(description="The blocks are put together as they are.")

    @property
    def text(self) -> str:
        """The whole content."""
        return joined(self.content)


class AnthropicMetadata(Body):
    """`metadata`."""

    user_id: str | None = Field(None, max_length=MAX_NAME_CHARS, description="The end user, for the request log.")


class CountTokensBody(Body):
    """What makes a prompt."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "mcp_servers": _NO_TOOLS,
        "context_management": "nothing is left out of a conversation unasked; shorten it before you send it",
        "output_config": "grammars and efforts are not in this version; say it in system",
        "output_format": "grammars are not in this version; say it in system",
        **dict.fromkeys(("user_profile_id", "workspace_id"), "they are another service's; leave it out"),
    }
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "cache_control": _CACHED_ANYWAY,
        "speed": '"standard" only; there is one speed',
        "thinking": '`{"type": "disabled"}` only',
        "tool_choice": '`{"type": "auto"}` and `{"type": "none"}` only; no tool is ever called',
        "tools": "an empty list only",
    }

    model: str | None = Field(None, description="The name in `/v1/models`; absent is as good.")
    messages: Annotated[Checked[AnthropicMessage], Field(min_length=1)] = Field(
        description="The last one may be the assistant's: the answer goes on in it."
    )
    system: str | Checked[TextBlock] | None = Field(None, description="The blocks are put together as they are.")

    cache_control: CacheControl | None = None
    speed: Annotated[Any, Only(("standard",), "there is one speed; leave it out")] = None
    thinking: Annotated[Any, Only(({"type": "disabled"},), _NO_THOUGHTS)] = None
    tool_choice: Annotated[Any, Only(({"type": "auto"}, {"type": "none"}), _NO_TOOLS)] = None
    tools: Annotated[Any, Only(([],), _NO_TOOLS)] = None

    def turns(self) -> list[dict[str, str]]:
        """The conversation as chat templates know it, in turns of alternating roles.

        What an assistant said in several messages goes on where it was cut; other messages are put apart by an empty
        line.
        """
        turns: list[dict[str, str]] = [] if self.system is None else [_turn("system", joined(self.system))]
        for message in self.messages:
            if turns and turns[-1]["role"] == message.role:
                turns[-1]["content"] += ("" if message.role == "assistant" else "\n\n") + message.text
            else:
                turns.append(_turn(message.role, message.text))
        return turns

    @property
    def is_continued(self) -> bool:
        """Whether the answer goes on in the last message."""
        return self.messages[-1].role == "assistant"


class MessagesBody(CountTokensBody):
    """A conversation, and how to go on in it."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **CountTokensBody.REFUSED,
        "container": _NO_TOOLS,
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
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, description="-1 and 0 keep all tokens.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    metadata: AnthropicMetadata | None = None
    cache_salt: str | None = Field(
        None, max_length=MAX_NAME_CHARS, description="Share cached prefixes only with requests of the same salt."
    )
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description="As `cache_salt`; both must be equal.")
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description="Larger goes first.")

    service_tier: Annotated[Any, Only(("auto", "standard_only"), "there is one tier; leave it out")] = None

    @property
    def user(self) -> str | None:
        """The end user."""
        return None if self.metadata is None else self.metadata.user_id

    def to_sampling(self) -> SamplingParams:
        """How to choose tokens and when to stop. Raises RequestError for a value out of range."""
        return SamplingParams.from_dict(
            {
                "max_new_tokens": self.max_tokens,
                "stop": self.stop_sequences,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k or -1,
                "sampling_seed": self.seed,
            }
        )


def joined(content: str | list[TextBlock]) -> str:
    """A content as one text."""
    return content if isinstance(content, str) else "".join(block.text for block in content)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
