"""A mark for fields that take only some values, the limit on the length of names, and texts that many fields share."""

import dataclasses
import json
from typing import Any, final

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from jsg.errors import RequestError
from jsg.server.http.field_rules import FieldRules

MAX_NAME_CHARS = 512  # of a user, a salt, a key

CACHE_SALT = "Requests share cached prefixes only if they have the same salt and come with the same API key."
EXTRA_KEY = "It divides the cache as `cache_salt` does: requests that share prefixes have equal values of both."
PRIORITY = "Requests with larger values leave the queue first, within the limit of `--max-bypass-tokens`."
MODEL = 'The name of the model in `/v1/models`. It may be left out, be empty or, as in SGLang, "default" or "unknown".'
END_USER = "The name of the end user, for the request log."
ALL_THE_ROOM = "Without it the answer may fill the context."
TOP_LOGPROBS = "The number of most likely tokens to report at each position. OpenAI's limit is 20."


@final
@dataclasses.dataclass(frozen=True)
class Only:
    """Marks a field that takes only some values. Other values are refused with the name of the field.

    Attributes:
        allowed: The values that it takes.
        otherwise: Why other values are refused, or what to do instead.
        harmless: Other values that are passed over; see `shared/harmless.py`.
        takes_null: Null is taken as absent.
    """

    allowed: tuple[Any, ...]
    otherwise: str
    harmless: tuple[Any, ...] = ()
    takes_null: bool = True

    def __get_pydantic_core_schema__(self, _source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Checks the value. Raises RequestError."""

        def check(value: Any, info: core_schema.ValidationInfo) -> Any:
            if (value is None and self.takes_null) or _is_one_of(value, self.allowed):
                return value
            rules = FieldRules.of(info.context)
            if _is_one_of(value, self.harmless) and not rules.is_strict:
                rules.pass_over(f"{name} {json.dumps(value)}", self.otherwise)
                return None
            if not self.allowed:
                raise RequestError(f"{name} is not supported: {self.otherwise}", param=name)
            rule = " or ".join(map(repr, self.allowed))
            raise RequestError(f"{name} must be {rule}, but got {repr(value)[:100]}: {self.otherwise}", param=name)

        name = str(handler.field_name)
        return core_schema.with_info_plain_validator_function(check)

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The values, and null where it is one."""
        return {"enum": [*self.allowed, *self.harmless, *([None] if self.takes_null else [])]}


def _is_one_of(value: Any, known: tuple[Any, ...]) -> bool:
    return any(type(value) is type(each) and value == each for each in known)
