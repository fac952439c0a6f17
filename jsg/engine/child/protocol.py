"""What the front process and the engine process tell each other: two message types, one for each direction.

Plain frozen dataclasses without JAX and without an encoder, so that the engine core and the front share them;
`client.py` and `process.py` put them on the wire. Every field has an empty default: a message carries whatever there
is to say since the last one.
"""

import dataclasses
from typing import Any, Literal

from jsg import errors
from jsg.config import EngineConfig
from jsg.errors import JsgError, RequestError
from jsg.types import GrammarSpec, Request, RequestOutput

ENGINE_CORE = "jsg.engine.core:EngineCore"

CORE_STATS = {
    "num_running": "requests in the batch",
    "num_waiting": "requests that wait for admission; a joined prompt is one, whatever its branches do",
    "num_holds": "prompts that are held in the cache for requests to come",
    "num_holds_broken": "holds that ended because their memory was needed, or the cache was flushed",
    "num_steps": "steps dispatched",
    "num_retracts": "times a running request was sent back to the queue for want of memory",
    "num_aborted": "requests that were aborted before their end; not holds that were released",
    "num_expired": "requests that waited longer than --queue-timeout",
    "num_failed": "requests that failed alone, by an error of their own",
    "prompt_tokens": "prompt tokens of admitted requests, each request counted once",
    "cached_tokens": "those of them that came from the cache",
    "branch_tokens": "prompt tokens in branches of joined prompts, each counted when its branch is first admitted",
    "branch_tokens_computed": "tokens of branches that were computed for a joined prompt; the others were cached",
    "generated_tokens": "output tokens made",
    "cache_hit_rate": "cached_tokens over prompt_tokens",
    "num_cached_tokens": "tokens in the prefix cache",
    "num_inserted_tokens": "tokens put into the prefix cache",
    "num_evicted_tokens": "tokens evicted from the prefix cache",
    "num_free_tokens": "KV pool: in no use",
    "num_evictable_tokens": "KV pool: cached, and used by no running request",
    "num_protected_tokens": "KV pool: cached, and used by running requests",
    "num_uncached_tokens": "KV pool: of running requests, not cached",
    "kv_usage": "part of the KV pool that running requests hold, from 0 to 1",
    "num_grammars": "grammars that the engine has tables of",
    "grammar_bytes": "memory of the grammars that are known or that requests have, with what was worked out, about",
    "num_masks": "token masks on the device",
    "num_masks_made": "token masks that were sent to the device",
    "num_masks_found": "times a token mask was there already",
    "num_drafts": "tokens that a grammar forced and jump-forward proposed",
    "num_drafts_taken": "those of them that became output",
    "num_grammar_failures": "requests that failed because of their grammar",
    "num_encoder_calls": "times that the vision encoder ran, for several tiles at a time",
    "num_encoded_tiles": "tiles of images and frames of videos that it encoded",
    "num_found_images": "times that a prompt came to an image or a video whose encoded tiles were there",
    "num_evicted_images": "images and videos whose encoded tiles were dropped for others",
    "vision_bytes": "memory of the device that encoded images have",
    "num_lowered": "programs traced",
    "num_compiled": "programs compiled",
    "num_programs_pending": "programs that the background thread has still to compile",
}
"""What every engine core's `stats` gives, and what it means. Totals never fall; gauges are those of the moment."""

LOOP_STATS = {
    "num_turns": "turns of the step loop, idle ones too",
    "idle_s": "seconds that the step loop waited for requests",
    "busy_s": "seconds that the step loop had work",
}
"""What the loop around the core adds to them in the engine process."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What is known of the model once it is loaded.

    Attributes:
        model_path: The name the model was asked for with.
        context_length: Tokens of prompt and output together, at most.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end an answer.
        dtype: Compute type, and that of weights that `--quantization` does not store in 8 bits.
        kv_dtype: Type of cached keys and values.
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
    kv_dtype: str
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
        heartbeat_fd: Where the engine writes its heartbeat, see `heartbeat.py`.
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
        number: Names the reply.
        name: What is asked.
        max_depth, max_nodes: Limits of `dump_cache`.
    """

    number: int
    name: Literal["flush_cache", "stats", "dump_cache"]
    max_depth: int = 0
    max_nodes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """The answer to the call of that number: a value, or why there is none."""

    number: int
    value: bool | dict[str, Any] | None = None
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """The engine did not take a request."""

    rid: str
    failure: Failure


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarTask:
    """What a grammar process is to compile, and the CPU time that it may take, in seconds."""

    spec: GrammarSpec
    cpu_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GrammarAnswer:
    """What the grammar process gives for a grammar: its tables, or why there are none."""

    tables: bytes | None = None
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class GrammarTables:
    """A compiled grammar on its way to the engine, under the key that requests name it by."""

    key: str
    tables: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ToEngine:
    """From the front. Aborts and grammars apply before the requests of the same message, what to forget after them."""

    aborts: tuple[str, ...] = ()
    grammars: tuple[GrammarTables, ...] = ()
    requests: tuple[Request, ...] = ()
    forgotten_grammars: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    stop: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FromEngine:
    """From the engine: while it starts `progress`, then `ready` or `failure` once, then what each step gave.

    Once it says `takes_grammars`, requests may have grammars; before, such a request would hold up all others.
    """

    outputs: tuple[RequestOutput, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    replies: tuple[Reply, ...] = ()
    progress: Progress | None = None
    ready: ModelInfo | None = None
    takes_grammars: bool = False
    failure: Failure | None = None
