"""What the front process and the engine process tell each other: two message types, one for each direction.

Plain frozen dataclasses without JAX and without an encoder, so that the engine core and the front share them;
`client.py` and `process.py` put them on the wire. Every field has an empty default: a message carries whatever there
is to say since the last one.
"""

import dataclasses
from typing import Literal

from jsg import errors
from jsg.config import EngineConfig
from jsg.errors import JsgError, RequestError
from jsg.types import Request, RequestOutput

ENGINE_CORE = "jsg.engine.core:EngineCore"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is known of the model once it is loaded.

    Attributes:
        model_path: The name the model was asked for with.
        context_length: Tokens of prompt and output together, at most.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end an answer.
        dtype: Compute and weight type.
        device: Platform and kind of the devices, for people.
        max_running_requests: Requests in one batch, at most.
        max_total_tokens: Size of the KV pool in tokens.
        max_request_tokens: Tokens of prompt and output together that can run: no more than context and pool hold.
        page_size: KV slots in one page.
    """

    model_path: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    max_running_requests: int
    max_total_tokens: int
    max_request_tokens: int
    page_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage of the start is ("load", "warm-up": `done` of `total`), or what it decided ("plan": `text`)."""

    stage: str
    done: int
    total: int
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """The one argument of the engine process, as JSON.

    Attributes:
        config: The knobs.
        address: ZeroMQ address of the front.
        parent_pid: The engine ends when this is no longer its parent.
        core: "module:name" of the engine core.
    """

    config: EngineConfig
    address: str
    parent_pid: int
    core: str = ENGINE_CORE


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A `JsgError` on its way to the other process."""

    kind: str
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: JsgError) -> "Failure":
        """Describes the error."""
        return cls(type(error).__name__, str(error), getattr(error, "param", None))

    def to_error(self) -> JsgError:
        """The error again, of its own class."""
        kind = getattr(errors, self.kind, JsgError)
        if issubclass(kind, RequestError):
            return kind(self.message, param=self.param)
        return kind(self.message)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A question that the engine answers between two steps."""

    number: int
    name: Literal["flush_cache", "stats"]


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the call of that number: a value, or why there is none."""

    number: int
    value: bool | dict[str, int | float] | None = None
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The engine did not take a request."""

    rid: str
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToEngine:
    """From the front: aborts apply before the requests of the same message."""

    aborts: tuple[str, ...] = ()
    requests: tuple[Request, ...] = ()
    calls: tuple[Call, ...] = ()
    stop: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FromEngine:
    """From the engine: while it starts `progress`, then `ready` or `failure` once, then what each step gave."""

    outputs: tuple[RequestOutput, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    replies: tuple[Reply, ...] = ()
    progress: Progress | None = None
    ready: ModelInfo | None = None
    failure: Failure | None = None
