"""Every exception jsg raises on purpose.

    JsgError
    ├── ConfigError              an option or a combination of options that cannot work
    ├── ModelError               a model directory that is missing, damaged or of an unknown family
    ├── CompileError             a program that the compiler refuses for this card
    ├── MemoryPlanError          weights and KV pool do not fit in the memory that was asked for
    ├── RequestError             a request that breaks a rule; HTTP 400
    │   ├── ContextLengthError   prompt and new tokens exceed the context
    │   ├── GrammarError         a grammar that is wrong or not supported
    │   ├── UnsupportedError     a program asks its backend for something that this kind of backend cannot do
    │   ├── PreviousResponseError  the response to continue is not stored
    │   ├── GraphError           a program's graph that is not well-formed or too large
    │   └── ProgramError         a program that breaks a rule of the language
    │       └── UnknownVariableError  it reads a variable that it never set
    ├── NotFoundError            the client named something that is not here; HTTP 404
    │   └── ModelNotFoundError   a model that is not served here
    ├── AbortedError             somebody aborted the request; HTTP 499
    ├── ForbiddenError           the caller's key does not allow it; HTTP 403
    ├── RateLimitError           the caller has too many requests under way; HTTP 429
    ├── QueueFullError           too many requests wait; HTTP 503
    │   └── QueueTimeoutError    a request waited too long
    ├── TimeLimitError           a request took longer than it may; HTTP 504
    │   └── FirstTokenTimeoutError  its first token took too long
    ├── ShuttingDownError        the server is ending; HTTP 503
    ├── BackendError             a server that programs run on cannot be reached, failed, or cannot do what is asked
    ├── TraceError               a program that cannot be traced, since it needs a value that only a run has
    ├── ScriptError              the script of a test and the calls of a program do not meet
    ├── ForbiddenCompileError    a compile after warm-up under --forbid-compile
    └── EngineDeadError          the engine process ended; HTTP 503

A message gives the rule, what was received, and what to do. It never carries a path of the server, an address or a
trace.
"""

import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Self

PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\[\]-]{0,99}")
"""What messages and logs show as the name of a field without quotes. A client may have made up any other name."""


class JsgError(Exception):
    """The root: catching it catches everything jsg raises on purpose.

    Attributes:
        retry_after_s: Whole seconds after which the same request may succeed; None if waiting does not help or nothing
            is known.
    """

    retry_after_s: int | None = None


class ConfigError(JsgError):
    """An option or a combination of options that cannot work."""


class ModelError(JsgError):
    """A model directory that is missing, damaged or of an unknown family."""


class CompileError(JsgError):
    """A program that the compiler refuses for this card."""


class MemoryPlanError(JsgError):
    """Weights and KV pool do not fit in the memory that was asked for.

    Attributes:
        left_tokens: For how many tokens of a KV pool there is room.
    """

    def __init__(self, message: str, left_tokens: int = 0):
        super().__init__(message)
        self.left_tokens = left_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class FieldName:
    """A field of a request in a message, where interfaces have different names for it."""

    name: str


type Message = str | tuple[str | FieldName, ...]


class RequestError(JsgError):
    """A request that breaks a rule.

    Attributes:
        message: The rule, what was received, and what to do.
        param: The name of the offending field as the client wrote it, or None.
        names: Our name of a field → the name that the client knows, for the fields in the message.
    """

    def __init__(self, message: Message, param: str | None = None):
        super().__init__(message)
        self.message = message
        self.param = param
        self.names: Mapping[str, str] = {}

    @classmethod
    def of(cls, param: str, said: str) -> Self:
        """The error whose message begins with the name of the offending field."""
        return cls((FieldName(param), f" {said}"), param)

    def __str__(self) -> str:
        parts = (self.message,) if isinstance(self.message, str) else self.message
        return "".join(part if isinstance(part, str) else self.names.get(part.name, part.name) for part in parts)


class ContextLengthError(RequestError):
    """Prompt and new tokens exceed the context length."""


def check_length(num_prompt_tokens: int, max_new_tokens: int, limit: int) -> None:
    """Raises ContextLengthError when a request is longer than `limit` tokens, the most that can ever run."""
    if num_prompt_tokens + max_new_tokens > limit:
        raise ContextLengthError(
            (
                f"prompt and new tokens together must be at most {limit}, but got {num_prompt_tokens} + "
                f"{max_new_tokens}; shorten the prompt or lower ",
                FieldName("max_new_tokens"),
            ),
            param="max_new_tokens",
        )


def check_prompt_len(num_tokens: int, limit: int | None, param: str) -> None:
    """Raises ContextLengthError for a prompt of so many tokens at least that to count them all is not worth it."""
    if limit is not None and num_tokens > 2 * limit:
        raise ContextLengthError(
            f"prompt and new tokens together must be at most {limit}, but the prompt alone has more than {2 * limit}; "
            "shorten the prompt",
            param=param,
        )


class GrammarError(RequestError):
    """A grammar that is wrong or uses something that is not supported.

    Attributes:
        field: The field that brought the grammar, as the client wrote it. None where `param` is the kind of the
            grammar, or another field.
    """

    def __init__(self, message: Message, param: str | None = None, field: str | None = None):
        super().__init__(message, field or param)
        self.field = field

    def __str__(self) -> str:
        # A client may have written the field into a structural tag.
        field = "" if self.field is None else f"{shown_name(self.names.get(self.field, self.field))} is not valid: "
        return field + super().__str__()


class UnsupportedError(RequestError):
    """A program asks its backend for something that this kind of backend cannot do."""


class PreviousResponseError(RequestError):
    """A request that continues a response which is not stored, or is no longer stored."""


class GraphError(RequestError):
    """A program's graph that is not well-formed, or larger than is allowed; the message names the node."""


class ProgramError(RequestError):
    """A program that breaks a rule of the language."""


class UnknownVariableError(ProgramError, KeyError):
    """A program, or its caller, reads a variable that the program never set."""


class NotFoundError(JsgError):
    """The client named something (a model, a request) that is not here."""


class ModelNotFoundError(NotFoundError):
    """The client named a model that is not served here."""

    param = "model"


class AbortedError(JsgError):
    """A request that somebody aborted, where the API that was called has no word for such an end."""


class ForbiddenError(JsgError):
    """The caller's key does not allow what it asks for."""


class RateLimitError(JsgError):
    """The caller has as many requests under way as `--max-requests-per-key` allows."""


class QueueFullError(JsgError):
    """More requests wait than `--max-queued-requests` allows."""


class QueueTimeoutError(QueueFullError):
    """A request waited longer than `--queue-timeout` for its first step."""


def queue_full(most: int) -> QueueFullError:
    """The error where so many requests run and wait."""
    return QueueFullError(f"at most {most} requests may run and wait, and so many do; try again later")


def waited_too_long(limit_s: float) -> QueueTimeoutError:
    """The error for a request that had no step in this time."""
    return QueueTimeoutError(
        f"the request waited for more than {limit_s:g} s (--queue-timeout) and had no step yet; "
        "the server is busy, try again later"
    )


class TimeLimitError(JsgError):
    """A request took longer than `--request-timeout` allows."""


class FirstTokenTimeoutError(TimeLimitError):
    """The first token of an answer did not come within `--first-token-timeout`."""


class ShuttingDownError(JsgError):
    """The server is ending: it takes no new requests, and those that did not finish in time end with this."""


class BackendError(JsgError):
    """A server that programs run on cannot be reached, failed, or cannot do what is asked.

    Attributes:
        status: The HTTP status it answered with; None where it gave none.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class TraceError(JsgError):
    """A program that cannot be traced, most often because it looks at a value that only a run has."""


class ScriptError(JsgError, AssertionError):
    """The script of a `jsg.testing.ScriptedBackend` and the calls of a program do not meet."""


class ForbiddenCompileError(JsgError):
    """A trace or compile after warm-up while `--forbid-compile` is set."""


class EngineDeadError(JsgError):
    """The engine process ended; nothing can be generated any more."""


# Checks of values that a client has sent, and messages that name the rule that a value breaks.


def require(ok: bool, param: str, rule: str, value: object, remedy: str = "leave it out for the default") -> None:
    """Raises RequestError unless `ok`: "`param` must be `rule`, but got `value`; `remedy`"."""
    if not ok:
        raise RequestError.of(param, f"must be {rule}, but got {quote(value)}; {remedy}")


def is_int(value: object) -> bool:
    """Whether the value is an integer. A boolean is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def whole(value: object) -> object:
    """A whole number that was written with a point, such as 16.0, as an integer; any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value


def is_number(value: object) -> bool:
    """Whether the value is a finite number. A boolean is none."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def quote(value: object) -> str:
    """The text of a value for a message. It is short, whatever a client has sent."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        if isinstance(value, list | tuple):
            return f"[{repr(list(value[:8]))[1:-1][:200]}" + (", ...]" if len(value) > 8 else "]")
        text = repr(value[:200] if isinstance(value, str) else value)
    except ValueError:  # an integer of thousands of digits has no text
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def place_name(path: Sequence[str | int]) -> str:
    """A place in a body in the form `messages[0].content`. Names that are no plain names are in quotes."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{shown_name(part)}" for part in path)
    return "".join(parts).removeprefix(".")


def shown_name(name: str) -> str:
    """The name of a field for a message: in quotes, unless it is a plain name."""
    return name if PLAIN_NAME.fullmatch(name) else quote(name[:40])


def are_token_ids(values: tuple[object, ...]) -> bool:
    """Whether each is an integer in [0, 2^31)."""
    return set(map(type, values)) <= {int} and (not values or (min(values) >= 0 and max(values) < 2**31))  # pyright: ignore[reportArgumentType]


def token_id(value: object) -> int | None:
    """A token id, which may be text since keys of JSON objects are texts; None for any other value."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31 else None


def near(name: str, known: Collection[str]) -> str:
    """The part of a message that asks whether a known name was meant; "" where none is like the given one."""
    found = difflib.get_close_matches(name, known, 1, 0.7)
    return f"; did you mean {found[0]}?" if found else ""
