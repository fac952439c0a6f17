"""The two messages between front and engine process, one for each direction.

They are plain frozen dataclasses without JAX and without an encoder, so that the engine core and the front share them.
Every field has an empty default, because a message carries only the news since the last one.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jsg import errors
from jsg.config import EngineConfig
from jsg.errors import JsgError, RequestError
from jsg.types import Request, RequestOutput

ENGINE_CORE = "jsg.engine.core:EngineCore"

CORE_STATS = {
    "num_running": "requests in the batch",
    "num_waiting": "requests that wait for admission; a joined prompt is one, whatever its branches do",
    "num_holds": "prompts that are held in the cache for later requests",
    "num_holds_broken": "holds that ended because their memory was needed, or the cache was flushed",
    "num_steps": "steps dispatched",
    "num_retracts": "times that a running request went back to the queue for want of memory",
    "num_aborted": "requests that were aborted before their end; not holds that were released",
    "num_expired": "requests that waited longer than --queue-timeout",
    "num_failed": "requests that failed alone, by an error of their own",
    "prompt_tokens": "prompt tokens of admitted requests, each request counted once",
    "cached_tokens": "prompt tokens of admitted requests that came from the cache",
    "branch_tokens": "prompt tokens in branches of joined prompts, each counted when its branch is first admitted",
    "branch_tokens_computed": "tokens of branches that were computed for a joined prompt; the others were cached",
    "generated_tokens": "output tokens made",
    "cache_hit_rate": "cached_tokens divided by prompt_tokens",
    "num_cached_tokens": "tokens in the prefix cache",
    "num_inserted_tokens": "tokens put into the prefix cache",
    "num_evicted_tokens": "tokens evicted from the prefix cache",
    "num_free_tokens": "KV pool: in no use",
    "num_evictable_tokens": "KV pool: cached, and used by no running request",
    "num_protected_tokens": "KV pool: cached, and used by running requests",
    "num_uncached_tokens": "KV pool: of running requests, not cached",
    "kv_usage": "part of the KV pool that running requests hold, from 0 to 1",
    "num_grammars": "grammars that the engine has tables of",
    "grammar_bytes": "about the memory of all grammars, with the states and masks that were computed of them",
    "num_masks": "token masks on the device",
    "num_masks_made": "token masks that were sent to the device",
    "num_masks_found": "times that a token mask was on the device already",
    "num_drafts": "tokens that a grammar forced and jump-forward proposed",
    "num_drafts_taken": "proposed tokens that became output",
    "num_grammar_failures": "requests that failed because of their grammar",
    "num_encoder_calls": "times that the vision encoder ran; it takes several tiles at a time",
    "num_encoded_tiles": "tiles of images and frames of videos that it encoded",
    "num_found_images": "times that the encoded tiles of an image or a video of a prompt were there already",
    "num_evicted_images": "images and videos whose encoded tiles were dropped for others",
    "vision_bytes": "memory of encoded images on the device",
    "num_lowered": "programs traced",
    "num_compiled": "programs compiled",
    "num_programs_pending": "programs that the background thread has yet to compile",
}
"""The names in every engine core's `stats`, and what they mean. Totals never fall; gauges say what is now."""

LOOP_STATS = {
    "num_turns": "turns of the step loop, idle ones too",
    "idle_s": "seconds in which the step loop waited for requests",
    "busy_s": "seconds in which the step loop had work",
}
"""The names that the loop of the engine process adds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The loaded model and the sizes of its engine.

    Attributes:
        model_path: The name that the user gave the model.
        context_length: Tokens of prompt and output together, at most.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end an answer.
        dtype: Compute type, and that of weights that `--quantization` does not store in 8 bits.
        kv_dtype: Type of cached keys and values.
        device: Platform and kind of the devices, for people.
        max_running_requests: Requests in one batch, at most.
        max_total_tokens: Size of the KV pool in tokens.
        max_request_tokens: Tokens of prompt and output together that context and pool both hold.
        page_size: KV slots in one page.
    """

    model_path: str
    context_length: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_dtype: str
    device: str
    max_running_requests: int
    max_total_tokens: int
    max_request_tokens: int
    page_size: int


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage of the start is ("load", "warm-up": `done` of `total`), or its decision ("plan": `text`)."""

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
        parent_pid: The engine ends when this process is no longer its parent.
        heartbeat_fd: The pipe for its heartbeat, see `heartbeat.py`.
        core: "module:name" of the engine core.
    """

    config: EngineConfig
    address: str
    parent_pid: int
    heartbeat_fd: int
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
    """A question that the engine answers between two steps.

    Attributes:
        number: The number that its reply will have.
        name: The question.
        max_depth, max_nodes: Limits of `dump_cache`.
    """

    number: int
    name: Literal["flush_cache", "stats", "dump_cache"]
    max_depth: int = 0
    max_nodes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the call of that number: a value or a failure."""

    number: int
    value: bool | dict[str, Any] | None = None
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Says that the engine did not take a request."""

    rid: str
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarTables:
    """A compiled grammar on its way to the engine, under the key that requests name it by."""

    key: str
    tables: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToEngine:
    """From the front. Aborts and grammars apply before the requests of a message, forgotten grammars after them."""

    aborts: Sequence[str] = ()
    grammars: Sequence[GrammarTables] = ()
    requests: Sequence[Request] = ()
    forgotten_grammars: Sequence[str] = ()
    calls: Sequence[Call] = ()
    stop: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FromEngine:
    """From the engine: `progress` while it starts, then `ready` or `failure` once, then the outputs of each step.

    Requests may have grammars once it says `takes_grammars`. Before, such a request would hold up all others.
    """

    outputs: Sequence[RequestOutput] = ()
    refusals: Sequence[Refusal] = ()
    replies: Sequence[Reply] = ()
    progress: Progress | None = None
    ready: ModelInfo | None = None
    takes_grammars: bool = False
    failure: Failure | None = None
