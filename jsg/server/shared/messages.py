"""Messages as OpenAI's clients write them → messages as chat templates take them."""

import itertools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import msgspec
from pydantic import Field, model_validator

from jsg.errors import RequestError
from jsg.processing.media.base64_files import MAX_FRAMES
from jsg.processing.snapshot_points import PlacedText
from jsg.server.http.body import Body, Checked, check_fields
from jsg.server.http.field_rules import FieldRules
from jsg.server.media_sources import MediaSource, joined_content
from jsg.speech.prompts.chat_template import ChatTemplate

ONE_DETAIL = "a model sees every picture in the one way that it was trained on"
URL = "A `data:` URL in base64, or an http URL of a host that the server allows."
JOINED = "A text, or a list of parts, which are joined without anything between them."
ARGUMENTS = (
    "A JSON object or its text, which the chat template gets decoded. A text that is no JSON object is rendered as it "
    "is, with a warning."
)

_MAX_DEPTH = 64
DROPPED = "the chat template drops the thoughts of earlier turns"
_NO_FILES = "models read text, pictures and videos only; send the content as text"
PREFIX_END = (
    "Marks the end of what other requests have too. A model whose layers keep states keeps one there; with others it "
    "changes nothing, because what comes again is found anyway while there is room."
)
_THOUGHTS = ("reasoning_content", "reasoning")
_FOREIGN: Mapping[str, tuple[str, ...]] = {
    "system": ("tool_calls", "function_call", "tool_call_id", "refusal", *_THOUGHTS),
    "developer": ("tool_calls", "function_call", "tool_call_id", "refusal", *_THOUGHTS),
    "user": ("tool_calls", "function_call", "tool_call_id", "refusal", *_THOUGHTS),
    "assistant": ("tool_call_id",),
    "tool": ("tool_calls", "function_call", "refusal", *_THOUGHTS),
    "function": ("tool_calls", "function_call", "tool_call_id", "refusal", *_THOUGHTS),
}
"""Role → the fields that a message of this role must not have."""


class ImageUrl(Body):
    """The source of a picture."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {"detail": ONE_DETAIL}

    url: str = Field(description=URL)
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoUrl(Body):
    """The source of a video."""

    url: str = Field(description=URL)
    num_frames: int | None = Field(
        None, ge=1, le=MAX_FRAMES, description="The number of frames that the model sees, evenly spaced."
    )


class ContentPart(Body):
    """A part of the content of a message."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("input_audio", "file", "audio_url", "image_embeds"), _NO_FILES),
        "input_image": "only /v1/responses takes it; send image_url",
    }

    type: Literal["text", "refusal", "image_url", "video_url"]
    text: str | None = None
    image_url: ImageUrl | None = Field(None, description="A picture, for a model that sees.")
    video_url: VideoUrl | None = Field(None, description="A video, for a model that takes videos.")
    refusal: str | None = Field(None, description="The text with which the assistant refused.")
    cache_control: dict[str, Any] | None = Field(None, description=PREFIX_END)
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description=PREFIX_END)

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        kinds = {kind: kind for kind in ("text", "refusal", "image_url", "video_url")}
        check_fields(self, self.type, f"a part of type {self.type}", "messages", kinds)
        return self

    @property
    def piece(self) -> str | MediaSource:
        """Its text, or the source of its picture or video."""
        if self.image_url is not None:
            return MediaSource("image", self.image_url.url)
        if self.video_url is not None:
            return MediaSource("video", self.video_url.url, self.video_url.num_frames)
        return self.text or self.refusal or ""

    @property
    def ends_prefix(self) -> bool:
        """Whether other requests are likely to go on after it."""
        return self.cache_control is not None or self.prompt_cache_breakpoint is not None


class FunctionCall(Body):
    """The call of a function by the assistant."""

    name: str
    arguments: str | dict[str, Any] = Field(description=ARGUMENTS)

    def to_template(self, rules: FieldRules) -> dict[str, Any]:
        """The call with its arguments decoded. The rules take note of arguments that are no object."""
        return {"name": self.name, "arguments": arguments_for_template(self.arguments, rules)}


def arguments_for_template(given: str | dict[str, Any], rules: FieldRules) -> str | dict[str, Any]:
    """The arguments of a call as the chat template gets them: an object, or a text that is none, with a warning.

    A call that was cut short leaves such a text, and the conversation goes on nevertheless.
    """
    if isinstance(given, dict):
        return given
    try:
        arguments = msgspec.json.decode(given or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        arguments = None
    if arguments is not None and _is_shallow(arguments, _MAX_DEPTH):
        return arguments
    rules.warn("arguments of a call are no JSON object: the model sees the text that they are")
    return given


class ToolCall(Body):
    """A call of a tool by the assistant."""

    REFUSED: ClassVar[Mapping[str, str]] = {"custom": "only functions can be called; write it as a call of a function"}
    ACCEPTED: ClassVar[Mapping[str, str]] = {"index": "clients copy it from the events of a stream"}

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message of a conversation."""

    REFUSED: ClassVar[Mapping[str, str]] = {"audio": _NO_FILES}
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "type": "lm-evaluation-harness writes 'text' into every message",
        "annotations": "clients send back the answers of other servers unchanged, and chat templates do not read it",
    }

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Checked[ContentPart] | None = Field(
        None, description=f"{JOINED} It may be null in a message of an assistant that has `tool_calls`."
    )
    name: str | None = Field(
        None, description="The name of the speaker. The chat template gets it, but many templates do not show it."
    )
    refusal: str | None = Field(
        None, description="For the role `assistant`: the text with which the assistant refused, instead of `content`."
    )
    tool_calls: Checked[ToolCall] | None = Field(
        None, description="For the role `assistant`: the calls of tools, if the chat template shows them."
    )
    tool_call_id: str | None = Field(None, description="For the role `tool`: the id of the call that it answers.")
    function_call: FunctionCall | None = Field(None, description="The old form of `tool_calls`.")
    reasoning_content: str | None = Field(
        None,
        description="For the role `assistant`: its thoughts. The chat template keeps them or drops them. Where it does "
        "not read them, this brings a warning.",
    )
    reasoning: str | None = Field(None, description="vLLM's newer name of `reasoning_content`.")
    type: Literal["text", "message"] | None = None
    annotations: list[dict[str, Any]] | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        for name in _FOREIGN[self.role]:
            if getattr(self, name):
                raise RequestError(f"a message of role {self.role} must not have {name}; leave it out", name)
        if self.role == "tool" and self.tool_call_id is None:
            raise RequestError(
                "a message of role tool must have tool_call_id, but it is missing; add the id of the call", "messages"
            )
        if self.role == "function" and self.name is None:
            raise RequestError(
                "a message of role function must have name, but it is missing; add the name of the function", "messages"
            )
        says_something = self.refusal is not None or bool(self.tool_calls) or self.function_call is not None
        if self.content is None and self.role != "function" and not says_something:
            raise RequestError(
                f"a message of role {self.role} must have content, but it is missing; add it", "messages"
            )
        return self

    def to_template(self, template: ChatTemplate, rules: FieldRules) -> dict[str, Any]:
        """The message in the form of chat templates, with a `MediaSource` in place of each picture and video.

        The role `developer` becomes its older name `system` where the template does not know it, and `function` becomes
        its newer name `tool`. Raises RequestError for fields that the template would leave out; the rules take note of
        thoughts that it does not read, and of arguments that are no object.
        """
        role = {"function": "tool"}.get(self.role, self.role)
        if role == "developer" and role not in template.words:
            role = "system"
        message: dict[str, Any] = {"role": role, "content": self._content()}
        calls = self._calls(rules)
        others = {
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        message |= {name: value for name, value in others.items() if value is not None}
        if not fit_thoughts(message, template):
            rules.note("reasoning_content", DROPPED)
        check_fits(message, template)
        return message

    def _content(self) -> str | list[Any]:
        if isinstance(self.content, str):
            return joined_content([self.content, self.refusal or ""])
        parts = [[part.piece, *[PlacedText()] * part.ends_prefix] for part in self.content or ()]
        return joined_content([*itertools.chain.from_iterable(parts), self.refusal or ""])

    def _calls(self, rules: FieldRules) -> list[dict[str, Any]]:
        if self.function_call is not None:
            return [{"type": "function", "function": self.function_call.to_template(rules)}]
        return [
            {"id": call.id, "type": "function", "function": call.function.to_template(rules)}
            for call in self.tool_calls or ()
        ]


def check_fits(message: Mapping[str, Any], template: ChatTemplate) -> None:
    """Raises RequestError where the template has no place for a field or the role of a message."""
    read = [("the field", "tool_calls")] * ("tool_calls" in message)
    for what, word in [("the role", "tool")] * (message["role"] == "tool") + read:
        if word not in template.words:
            raise RequestError.of(
                "messages",
                f"must fit the chat template of the model, but it has no place for {what} {word}; write it "
                "into the content of a user's or an assistant's message",
            )


def fit_thoughts(message: dict[str, Any], template: ChatTemplate) -> bool:
    """Moves the thoughts of a message from `reasoning_content` to the field that the template reads.

    Where it reads none, or refuses them beside the rest of the message, this takes them out and returns False.
    """
    thoughts, field = message.pop("reasoning_content", None), template.thoughts_field
    if not thoughts and (thoughts is None or field is None):
        return True
    if field is None or (message["content"] and "tool_calls" in message and not template.takes_thoughts_beside_calls):
        return False
    message[field] = thoughts
    return True


def _is_shallow(value: Any, max_depth: int) -> bool:
    if not isinstance(value, dict | list):
        return True
    inside = value.values() if isinstance(value, dict) else value
    return max_depth > 0 and all(_is_shallow(item, max_depth - 1) for item in inside)
