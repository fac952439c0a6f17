"""The base of all request bodies."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    StringConstraints,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jsg.errors import GrammarError, JsgError, RequestError, whole
from jsg.server.http.field_rules import FieldRules
from jsg.types import GRAMMAR_FIELDS

MAX_ITEMS = 2048  # of any list but one of token ids
CHUNK = 2**16


def _check_token_ids(ids: list[int]) -> list[int]:
    """Checks token ids four times as fast as a rule for each item. Other threads get their turn between chunks."""
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        if min(chunk) < 0 or max(chunk) >= 2**31:
            wrong = next(token_id for token_id in chunk if not 0 <= token_id < 2**31)
            raise PydanticCustomError("token_ids", "made of integers in [0, 2^31), and not {wrong}", {"wrong": wrong})
    return ids


# A list of a million wrong items is one error, not a million.
type Checked[T] = Annotated[list[T], FailFast(), Field(max_length=MAX_ITEMS)]
type TokenId = Annotated[int, Field(ge=0, lt=2**31)]
type TokenIds = Annotated[
    list[int],
    FailFast(),
    AfterValidator(_check_token_ids),
    Field(json_schema_extra={"items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**31}}),
]
type Prompts = str | TokenIds | Checked[str] | Checked[TokenIds]
type Rid = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[!-~]+$")]


@dataclasses.dataclass(frozen=True, slots=True)
class ClientNames:
    """What the client of an interface calls the fields that errors name.

    Attributes:
        names: Our name of a field → the client's name.
        params: As `names`, for the faulty field only and not for the message.
        grammar: The field that brought the grammar. A grammar of several parts tells of some which field brought them.
    """

    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    params: Mapping[str, str] = dataclasses.field(default_factory=dict)
    grammar: str | None = None

    def give(self, error: JsgError) -> None:
        """Makes an error show these names."""
        if self.grammar and isinstance(error, GrammarError) and error.param in (None, *GRAMMAR_FIELDS):
            error.param = error.field = self.grammar
        if isinstance(error, RequestError):
            error.names = {**self.names, **error.names}
            error.param = {**self.names, **self.params}.get(str(error.param), error.param)


class Body(BaseModel):
    """A JSON object with known fields only, exact types and finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Field of the published interface that is refused → the reason, or what to do instead.

    Null is taken as absent, and so are false, an empty text, an empty list and an empty object.
    """

    HARMLESS: ClassVar[Mapping[str, str]] = {}
    """Field of the published interface that is passed over → the reason. `shared/harmless.py` has all of them."""

    ACCEPTED: ClassVar[Mapping[str, str]] = {}
    """Field below that clients send and that changes nothing here → the reason."""

    ERROR_NAMES: ClassVar[ClientNames] = ClientNames()
    """What `client_names` gives where that does not depend on the fields."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any, info: ValidationInfo) -> Any:
        """Stops at the first unknown name. Raises RequestError, which names it."""
        if not isinstance(data, dict):
            return data
        rules, fields = FieldRules.of(info.context), cls.known_fields()
        for name, value in data.items():
            if name in cls.REFUSED:
                if not is_off(value):
                    raise RequestError(f"{name} is not supported: {cls.REFUSED[name]}", param=name)
            elif name in cls.HARMLESS:
                if not is_off(value):
                    rules.pass_over(name, cls.HARMLESS[name])
            elif name not in fields and (value is not None or rules.is_strict) and not cls._is_of_unknown_kind(data):
                known = ", ".join(sorted(fields))
                given = str(name)[:100]
                raise RequestError(f"unknown field {given!r}; leave it out, or use one of {known}", param=given)
        return {name: whole(value) for name, value in data.items() if name in fields}

    @classmethod
    def _is_of_unknown_kind(cls, data: Mapping[str, Any]) -> bool:
        """Whether pydantic will refuse the `type`, which says more than that its fields are not known either."""
        field = cls.model_fields.get("type")
        if field is None or not isinstance(data.get("type"), str):
            return False
        one_of = [each for each in (field.annotation, *get_args(field.annotation)) if get_origin(each) is Literal]
        return bool(one_of) and data["type"] not in get_args(one_of[0])

    def client_names(self) -> ClientNames:
        """What the client calls the fields that errors name."""
        return self.ERROR_NAMES

    @classmethod
    @functools.cache
    def known_fields(cls) -> frozenset[str]:
        """The names of the fields that clients may send."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())


def check_fields(body: Body, kind: str, what: str, param: str, fields: Mapping[str, str]) -> None:
    """Checks that an object of one of several kinds has the fields of its kind, and none of the others.

    Args:
        body: The object.
        kind: Its kind.
        what: The name of such an object in messages.
        param: The field that is at fault.
        fields: Kind → the names of its fields. A name with a question mark may be left out. Other fields go with each.

    Raises:
        RequestError: A field is missing, or belongs to another kind.
    """
    own = fields[kind].split()
    for name in dict.fromkeys(word.rstrip("?") for words in fields.values() for word in words.split()):
        is_given, shown = getattr(body, name) is not None, name.rstrip("_")
        if name in own and not is_given:
            raise RequestError(f"{what} must have {shown}, but it is missing; add it", param)
        if is_given and name not in own and f"{name}?" not in own:
            raise RequestError(f"{what} must not have {shown}; leave it out", param)


def is_off(value: object) -> bool:
    """Whether a value asks for nothing: null, false, or an empty text, list or object.

    Clients that send every field they know send such values for fields that they do not use. Zero may ask for more.
    """
    return value is None or value is False or value in ("", [], {})


def is_prompt_list(given: str | list[int] | list[str] | list[list[int]]) -> bool:
    """Whether a field of prompts holds a list of them, rather than one text or one list of token ids."""
    return isinstance(given, list) and not (given and isinstance(given[0], int))
