"""What clients send to `/v1/decisions`."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from jsg.errors import RequestError
from jsg.lang.words import decisions
from jsg.lang.words.decisions import MAX_LABELS, MAX_QUESTIONS, Question, check_labels
from jsg.server.http.body import Body, Checked, ClientNames, check_fields
from jsg.server.shared.deciding import as_text, names_of_input
from jsg.server.shared.fields import CACHE_SALT, END_USER, EXTRA_KEY, MAX_NAME_CHARS, MODEL, PRIORITY
from jsg.server.shared.harmless import harmless
from jsg.server.shared.messages import ARGUMENTS, JOINED, ONE_DETAIL, URL

MAX_ID_CHARS = 128
_ONE_NAME = "chat templates know one name of a function; write it into name"
_NO_FILES = "models read text and pictures; send a picture as image_url, and anything else as text"
_NOT_SHOWN = "chat templates do not read it"

type Json = dict[str, Any] | list[dict[str, Any]]


class DecisionPart(Body):
    """A part of a content: text, a picture or JSON."""

    REFUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(("file_id", "file_data", "file_url", "filename"), _NO_FILES)
    HARMLESS: ClassVar[Mapping[str, str]] = harmless("prompt_cache_breakpoint")
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "detail": ONE_DETAIL,
        **dict.fromkeys(("annotations", "logprobs"), _NOT_SHOWN),
    }

    type: Literal["input_text", "output_text", "refusal", "input_image", "input_json"]
    text: str | None = None
    refusal: str | None = Field(None, description="The text with which the assistant refused.")
    image_url: str | None = Field(None, description=URL)
    data: Json | None = Field(None, description="An object, or a list of objects. The model reads it as JSON.")
    detail: Literal["auto", "low", "high", "original"] | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        check_fields(self, self.type, f"a part of type {self.type}", "input", _PART_FIELDS)
        return self

    @property
    def words(self) -> str:
        """Its text; empty for a picture."""
        return as_text(self.data) if self.data is not None else self.text or self.refusal or ""


_PART_FIELDS: Mapping[str, str] = {
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "input_image": "image_url",
    "input_json": "data",
}
"""Kind of part → its fields, as `check_fields` reads them."""


class DecisionItem(Body):
    """A message, a call of a tool, or the result of a call."""

    REFUSED: ClassVar[Mapping[str, str]] = {"namespace": _ONE_NAME}
    HARMLESS: ClassVar[Mapping[str, str]] = harmless("phase")
    ACCEPTED: ClassVar[Mapping[str, str]] = dict.fromkeys(("id", "status"), _NOT_SHOWN)

    type: (
        Literal["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"]
        | None
    ) = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | Checked[DecisionPart] | None = Field(None, description=f"The content of a message. {JOINED}")
    call_id: str | None = Field(
        None, max_length=MAX_ID_CHARS, description="The id that a call and the result of the call share."
    )
    name: str | None = Field(None, max_length=MAX_ID_CHARS, description="The name of the tool that is called.")
    arguments: str | None = Field(None, description=f"The arguments of a call of a function. {ARGUMENTS}")
    input: str | None = Field(
        None, description="The input of a call of a custom tool. The chat template gets it as the argument `input`."
    )
    output: str | Checked[DecisionPart] | None = Field(None, description=f"The result of a call. {JOINED}")
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    @property
    def parts(self) -> Sequence[DecisionPart | str]:
        """The parts of the content or of the result."""
        said = self.content if self.output is None else self.output
        return [said] if isinstance(said, str) else said or ()

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        kind = self.type or "message"
        check_fields(self, kind, f"an input item of type {kind}", "input", _ITEM_FIELDS)
        is_result = self.output is not None
        if (is_result or self.role != "user") and any(not isinstance(p, str) and p.image_url for p in self.parts):
            what = "the result of a call" if is_result else f"a message of role {self.role}"
            raise RequestError(
                f"{what} must be text, but has a picture; send the picture in a message of the user", "input"
            )
        return self


_ITEM_FIELDS: Mapping[str, str] = {
    "message": "role content",
    "function_call": "call_id name arguments",
    "function_call_output": "call_id output",
    "custom_tool_call": "call_id name input",
    "custom_tool_call_output": "call_id output",
}
"""Kind of item → its fields, as `check_fields` reads them."""


class DecisionChoice(Body):
    """A choice."""

    value: str | bool = Field(description='The answer. "true" and true are different.')
    description: str | None = Field(None, description="When it is right.")


class DecisionLevel(Body):
    """A level."""

    label: str = Field(description="The name of the level.")
    description: str | None = Field(None, description="When it is reached.")


class DecisionQuestion(Body):
    """A question about the input."""

    type: Literal["predicate", "choice", "score"]
    instructions: str | Checked[DecisionPart] = Field(
        description="The question, or what may be so: a text, or parts of text and JSON."
    )
    name: str | None = Field(None, max_length=MAX_NAME_CHARS, description="A name, which the answer repeats.")
    choices: Checked[DecisionChoice] | None = Field(
        None, description=f"For the type `choice`: 2 to {MAX_LABELS}, each different."
    )
    levels: Checked[DecisionLevel] | None = Field(
        None, description=f"For the type `score`: 2 to {MAX_LABELS} from the lowest to the highest, each different."
    )

    @model_validator(mode="after")
    def _check_type(self) -> Self:
        kinds = {"predicate": "", "choice": "choices", "score": "levels"}
        check_fields(self, self.type, f"a question of type {self.type}", "questions", kinds)
        return self

    def question(self, field: str) -> Question:
        """The question. `field` is where the client wrote it. Raises RequestError."""
        given = self.instructions
        if not isinstance(given, str) and any(part.image_url for part in given):
            raise RequestError(
                f"{field}.instructions must be text, but has a picture; send the picture in the input",
                f"{field}.instructions",
            )
        asked = given if isinstance(given, str) else "".join(part.words for part in given)
        if self.choices is not None:
            labels = label_texts([choice.value for choice in self.choices])
            check_labels(labels, f"{field}.choices")
            described = [choice.description for choice in self.choices]
            return decisions.choice(asked, list(zip(labels, described, strict=True)))
        if self.levels is not None:
            check_labels([level.label for level in self.levels], f"{field}.levels")
            return decisions.score(asked, [(level.label, level.description) for level in self.levels])
        return decisions.predicate(asked)


class DecisionsBody(Body):
    """What `/v1/decisions` takes: an input, and questions about it."""

    ERROR_NAMES: ClassVar[ClientNames] = names_of_input("input")

    HARMLESS: ClassVar[Mapping[str, str]] = harmless("prompt_cache_options")
    ACCEPTED: ClassVar[Mapping[str, str]] = {
        "prompt_cache_key": "all requests of an API key share its cached prefixes; cache_salt separates them"
    }

    input: str | Annotated[Checked[DecisionItem], Field(min_length=1)] = Field(
        description="A text, which is a message of the user, or a list of items."
    )
    questions: Annotated[Checked[DecisionQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)] = Field(
        description="Questions, which do not see each other."
    )
    model: str | None = Field(None, description=MODEL)
    safety_identifier: str | None = Field(None, max_length=MAX_NAME_CHARS, description=END_USER)
    cache_salt: str | None = Field(None, max_length=MAX_NAME_CHARS, description=CACHE_SALT)
    extra_key: str | None = Field(None, max_length=MAX_NAME_CHARS, description=EXTRA_KEY)
    priority: int | None = Field(None, ge=-(2**31), lt=2**31, description=PRIORITY)
    prompt_cache_key: str | None = Field(None, max_length=MAX_NAME_CHARS)

    @model_validator(mode="after")
    def _check_calls(self) -> Self:
        called: set[tuple[str, str | None]] = set()
        for index, item in enumerate([] if isinstance(self.input, str) else self.input):
            kind = (item.type or "message").removesuffix("_output")
            if item.output is None:
                called.add((kind, item.call_id))
            elif (kind, item.call_id) not in called:
                raise RequestError(
                    f"input[{index}] must be the result of a {kind} before it, but no call_id is "
                    f"{str(item.call_id)!r}; add the call",
                    "input",
                )
        return self


def label_texts(values: Sequence[str | bool]) -> list[str]:
    """The label of each value: its text, or its JSON if otherwise two different values had one label."""
    labels = [as_text(value) for value in values]
    if len(set(labels)) == len(labels):
        return labels
    return [json.dumps(value, ensure_ascii=False) for value in values]
