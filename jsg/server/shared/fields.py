"""A mark for fields that take only some values, and the limit on the length of names."""

import dataclasses
from typing import Any, final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from jsg.errors import RequestError

MAX_NAME_CHARS = 512  # of a user, a salt, a key


@final
@dataclasses.dataclass(frozen=True)
class Only:
    """Marks a field that takes only some values. Other values are refused with the name of the field.

    Attributes:
        allowed: The values that it takes; null is taken as absent.
        otherwise: Why other values are refused, or what to do instead.
    """

    allowed: tuple[Any, ...]
    otherwise: str

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Checks the value. Raises RequestError."""

        def check(value: Any) -> Any:
            if value is None or any(type(value) is type(known) and value == known for known in self.allowed):
                return value
            rule = " or ".join(map(repr, self.allowed))
            raise RequestError(f"{name} must be {rule}, but got {repr(value)[:100]}: {self.otherwise}", param=name)

        name = str(handler.field_name)
        return core_schema.no_info_plain_validator_function(check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The values, and null."""
        return {"enum": [*self.allowed, None]}
