"""The two messages between front and engine process, one for each direction.

They are plain frozen dataclasses without JAX and without an encoder, so that the engine core and the front share them.
Every field has an empty default, because a message carries only the news since the last one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jsg import errors
from jsg.config import EngineConfig
from jsg.errors import GrammarError, JsgError, RequestError
from jsg.step_reports import Source
from jsg.types import Embedder, Request, RequestOutput
from jsg.waits import IN_THE_ENGINE, WHY, stat_of

ENGINE_CORE = "jsg.engine.core:EngineCore"


@dataclasses.dataclass(frozen=True, slots=True)
class Stat:
    """One value of an engine's `stats`.

    Attributes:
        kind: A "counter" is a total, which never falls; a "gauge" says what is now.
        text: One sentence for people.
        series: The name under which `/metrics` shows it, without prefix and suffix; None for a value that is not shown.
    """

    kind: Literal["counter", "gauge"]
    text: str
    series: str | None = None


def _counter(text: str, series: str | None = None) -> Stat:
    return Stat("counter", text, series)


def _gauge(text: str, series: str | None = None) -> Stat:
    return Stat("gauge", text, series)


CORE_STATS: Mapping[str, Stat] = {
    "num_running": _gauge("The requests in the engine's batch.", "requests_running"),
    "num_waiting": _gauge("The requests that wait for their first step; a joined prompt is one.", "requests_waiting"),
    **{stat_of(reason): _gauge(f"The requests that wait: {WHY[reason]}") for reason in IN_THE_ENGINE},
    "num_holds": _gauge("The holds, which keep prompts in the cache for requests to come.", "holds"),
    "num_holds_broken": _counter("The holds that ended because their memory was needed.", "holds_broken"),
    "num_retracts": _counter(
        "The retracts: running requests that went back to the queue for want of memory.", "retracts"
    ),
    "num_aborted": _counter("The requests that were aborted before their end, without holds that were released."),
    "num_expired": _counter("The requests that waited longer than --queue-timeout."),
    "num_failed": _counter("The requests that failed alone, by an error of their own."),
    "num_grammars": _gauge("The grammars whose tables the engine has.", "grammars"),
    "grammar_bytes": _gauge(
        "The approximate memory of all grammars, cached ones and those of requests.", "grammar_bytes"
    ),
    "num_grammar_failures": _counter("The requests that failed because of their grammar.", "grammar_failures"),
    "num_masks": _gauge("The token masks on the device.", "token_masks"),
    "num_masks_made": _counter("The token masks that were sent to the device.", "token_masks_made"),
    "num_masks_found": _counter(
        "The token masks that were on the device already when they were needed.", "token_masks_found"
    ),
    "num_drafts": _counter("The draft tokens that steps verified."),
    "num_drafts_taken": _counter("The draft tokens that became output, each of which saved its request a step."),
    **{f"num_drafts_{each.label}": _counter(f"The draft tokens {each.text}.") for each in Source},
    **{
        f"num_drafts_taken_{each.label}": _counter(f"The draft tokens {each.text} and that became output.")
        for each in Source
    },
    "num_gate_open": _counter("The plans of steps in which drafts were worth a larger step.", "draft_gate_open"),
    "num_gate_shut": _counter("The plans of steps in which drafts were proposed and not worth it.", "draft_gate_shut"),
    "num_encoder_calls": _counter("The calls of the vision encoder.", "encoder_calls"),
    "num_encoded_tiles": _counter(
        "The tiles of images and frames of videos that the vision encoder encoded.", "encoded_tiles"
    ),
    "num_found_images": _counter(
        "The images and videos of prompts whose encoded tiles were on the device already.", "encoded_images_found"
    ),
    "num_evicted_images": _counter(
        "The images and videos whose encoded tiles were evicted for others.", "encoded_images_evicted"
    ),
    "vision_bytes": _gauge("The device memory of encoded images and videos.", "vision_cache_bytes"),
    "num_free_tokens": _gauge("KV pool: the tokens in no use."),
    "num_evictable_tokens": _gauge("KV pool: the tokens that are cached, and that no running request uses."),
    "num_protected_tokens": _gauge("KV pool: the tokens that are cached, and that running requests use."),
    "num_uncached_tokens": _gauge("KV pool: the tokens of running requests that are not cached."),
    "kv_usage": _gauge("The share of the KV pool that running requests use, from 0 to 1.", "kv_usage"),
    "num_cached_tokens": _gauge("The tokens in the prefix cache.", "prefix_cache_tokens"),
    "num_inserted_tokens": _counter("The tokens that were put into the prefix cache.", "inserted_tokens"),
    "num_evicted_tokens": _counter("The tokens that were evicted from the prefix cache.", "evicted_tokens"),
    "cache_hit_rate": _gauge("The share of all prompt tokens that came from the cache, from 0 to 1.", "cache_hit_rate"),
    "prompt_tokens": _counter(
        "The prompt tokens of admitted requests. The n answers to a prompt are n requests.", "engine_prompt_tokens"
    ),
    "cached_tokens": _counter(
        "The prompt tokens of admitted requests that came from the cache.", "engine_cached_tokens"
    ),
    "branch_tokens": _counter("The prompt tokens in branches of joined prompts, counted when a branch is admitted."),
    "branch_tokens_computed": _counter("The tokens of branches that were computed for a joined prompt."),
    "generated_tokens": _counter(
        "The tokens that the engine generated, with those after a stop string or a disconnect.",
        "engine_generated_tokens",
    ),
    "num_steps": _counter("The steps of the engine.", "engine_steps"),
    "num_lowered": _counter("The programs that were traced.", "programs_lowered"),
    "num_compiled": _counter("The programs that were compiled.", "programs_compiled"),
    "num_loaded": _counter("The programs that were read from --programs.", "programs_loaded"),
    "num_programs_pending": _gauge("The programs that are still to be compiled or read.", "programs_pending"),
}
"""The values in every engine core's `stats`."""

STATE_STATS: Mapping[str, Stat] = {
    "num_free_states": _gauge("Slots of states: those in no use."),
    "num_running_states": _gauge("Slots of states: those of running requests."),
    "num_evictable_states": _gauge("Slots of states: those of prefixes that no running request needs."),
    "num_locked_states": _gauge("Slots of states: those that running requests read and do not write."),
    "num_kept_states": _counter("The states that were kept of prefixes.", "states_kept"),
    "num_forgotten_states": _counter(
        "The states of prefixes that are gone: for another one, with their tokens, or by a flush.", "states_forgotten"
    ),
}
"""The further values of an engine whose model has layers with a state of each request."""

LOOP_STATS: Mapping[str, Stat] = {
    "num_turns": _counter("The turns of the step loop, idle ones too."),
    "idle_s": _counter("The seconds in which the step loop had no work.", "scheduler_idle_seconds"),
    "busy_s": _counter("The seconds in which the step loop had work.", "scheduler_busy_seconds"),
}
"""The values that the loop of the engine process adds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The loaded model and the sizes of its engine.

    Attributes:
        model_path: The name that the user gave the model.
        context_length: Tokens of prompt and output together, at most.
        vocab_size: Token ids are below it.
        eos_token_ids: Tokens that end an answer.
        dtype: Compute type, and that of weights that `--quantization` leaves as they are.
        kv_dtype: Type of cached keys and values.
        device: Platform and kind of the devices, for people.
        max_running_requests: Requests in one batch, at most.
        max_total_tokens: Size of the KV pool in tokens.
        max_request_tokens: Tokens of prompt and output together that context and pool both hold.
        page_size: KV slots in one page.
        caches_prefixes: Whether requests share prefixes: unless the user turned that off, or keeps no states of
            prefixes that layers need.
        caches_states: Whether the prefix cache keeps snapshots of the states of requests, since layers need them. A
            prefix can be used only where one was kept, so requests say where that is worth it (`Request.snapshot_at`).
        memory_plan: The bytes of each part of the memory plan, on one device, by its name for people.
        embedder: How vectors are made; None where the model generates text.
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
    caches_prefixes: bool = True
    caches_states: bool = False
    memory_plan: Mapping[str, int] = dataclasses.field(default_factory=dict)
    embedder: Embedder | None = None

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens of a prompt, at most. It leaves room for the one token that an answer has at least."""
        return self.max_request_tokens - (self.embedder is None)


@dataclasses.dataclass(frozen=True, slots=True)
class Progress:
    """How far a stage of the start is ("load", "warm-up": `done` of `total`), or its decision ("plan": `text`)."""

    stage: str
    done: int
    total: int
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KvEvents:
    """Where an engine publishes the events of its radix tree.

    Attributes:
        address: ZeroMQ address of the events.
        replay_address: ZeroMQ address of those who ask for past events.
        topic: What subscribers filter by.
        rank: The number of the engine.
    """

    address: str
    replay_address: str
    topic: str
    rank: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStart:
    """The one argument of the engine process, as JSON.

    Attributes:
        config: The knobs.
        address: ZeroMQ address of the front.
        parent_pid: The engine ends when this process is no longer its parent.
        heartbeat_fd: The pipe for its heartbeat, see `heartbeat.py`.
        core: "module:name" of the engine core.
        kv_events: Where it publishes the events of its tree; None where it does not.
        name: Its name in the log.
    """

    config: EngineConfig
    address: str
    parent_pid: int
    heartbeat_fd: int
    core: str = ENGINE_CORE
    kv_events: KvEvents | None = None
    name: str = "engine"


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A `JsgError` on its way to the other process."""

    kind: str
    message: errors.Message
    param: str | None = None
    field: str | None = None
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: JsgError) -> "Failure":
        """Describes the error."""
        message = error.message if isinstance(error, RequestError) else str(error)
        field = getattr(error, "field", None)
        return cls(type(error).__name__, message, getattr(error, "param", None), field, error.retry_after_s)

    def to_error(self) -> JsgError:
        """The error again, of its own class."""
        error = self._error()
        if self.retry_after_s is not None:
            error.retry_after_s = self.retry_after_s
        return error

    def _error(self) -> JsgError:
        kind = getattr(errors, self.kind, JsgError)
        if kind is GrammarError:
            return GrammarError(self.message, self.param, self.field)
        if issubclass(kind, RequestError):
            return kind(self.message, self.param)
        return kind(self.message)


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A question that the engine answers between two steps.

    Attributes:
        number: The number that its reply will have.
        name: The question.
        cursor, with_tokens: Arguments of `watch_cache`, see `TreeLog.look`.
    """

    number: int
    name: Literal["flush_cache", "stats", "watch_cache"]
    cursor: int = 0
    with_tokens: bool = False


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

    Requests may have grammars once it says `takes_grammars`. Before, such a request would hold up all others. `passed`
    has outputs that the front passes on to workers: see `Passing`.
    """

    outputs: Sequence[RequestOutput] = ()
    passed: Sequence[tuple[str, bytes]] = ()
    refusals: Sequence[Refusal] = ()
    replies: Sequence[Reply] = ()
    progress: Progress | None = None
    ready: ModelInfo | None = None
    takes_grammars: bool = False
    failure: Failure | None = None
