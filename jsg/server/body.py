"""The base of all request bodies."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, FailFast, Field, StringConstraints, model_validator

from jsg.errors import RequestError

# A list of a million wrong items is one error, not a million.
type Checked[T] = Annotated[list[T], FailFast()]
type TokenId = Annotated[int, Field(ge=0, lt=2**31)]
type TokenIds = Checked[TokenId]
type Prompts = str | TokenIds | Checked[str] | Checked[TokenIds]
type Rid = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[!-~]+$")]


class Body(BaseModel):
    """A JSON object with known fields only, exact types and finite numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    NOT_YET: ClassVar[frozenset[str]] = frozenset()
    """Fields of the published interface that this version does not have; null is as good as absent."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, data: Any) -> Any:
        """Stops at the first unknown name. Raises RequestError, which names it."""
        if not isinstance(data, dict):
            return data
        for name in data:
            if name in cls.NOT_YET:
                if data[name] is not None:
                    raise RequestError(f"{name} is not supported yet; leave it out", param=name)
            elif name not in cls.model_fields:
                known = ", ".join(sorted(cls.model_fields))
                raise RequestError(f"unknown field {str(name)[:100]!r}; known are {known}", param=str(name)[:100])
        return {name: value for name, value in data.items() if name not in cls.NOT_YET}


def is_prompt_list(given: str | list[int] | list[str] | list[list[int]]) -> bool:
    """Whether a field of prompts holds a list of them, rather than one text or one list of token ids."""
    return isinstance(given, list) and not (given and isinstance(given[0], int))
