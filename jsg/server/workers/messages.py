"""The messages between the hub and one of its workers. Every field is empty unless there is news.

    a worker ── entries, requests, ends, patterns, connections, report ──▶ the hub
    a worker ◀── model, outputs, failures, patterns, end ──────────────── the hub

Requests follow the first frame, as `jsg/engine/child/wire.py` writes them.
"""

import dataclasses
from collections.abc import Mapping

from jsg.config import EngineConfig, ServerConfig
from jsg.constrained.text_patterns import PatternSet
from jsg.engine.child.protocol import Failure, ModelInfo
from jsg.server.telemetry.series import Samples
from jsg.types import RequestOutput
from jsg.waits import WaitReason


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """The answers of one generation, which are let in together.

    Attributes:
        number: The worker's number of it, which is never used twice.
        tenant: Whose it is.
        num_answers: How many.
        is_hold: Whether it is a hold.
    """

    number: int
    tenant: str
    num_answers: int
    is_hold: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Begun:
    """What belongs to a request beside the request, which has the worker's name of it.

    Attributes:
        name: The worker's name of it, which is never used twice.
        rid: The client's name of it.
        owner: Whose it is.
        entry: The entry that it belongs to.
    """

    name: str
    rid: str
    owner: str
    entry: int


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """Patterns to compile for an owner, under the number of the question."""

    number: int
    patterns: PatternSet
    owner: str


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """The tables of patterns in msgpack, or why there are none."""

    number: int
    tables: bytes = b""
    failure: Failure | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """A connection whose next request the hub answers, and what has been read of that request."""

    slot: int
    begin: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What a worker has counted.

    Attributes:
        families: The samples of each series by its name.
        waits: How many HTTP requests wait now, by the reason.
    """

    families: Mapping[str, Samples]
    waits: Mapping[WaitReason, int]


@dataclasses.dataclass(slots=True, kw_only=True)
class ToHub:
    """From a worker. Entries apply before the requests of a message, ends after them.

    Attributes:
        entries: What wants to be let in.
        begun: One for each request of the message.
        aborts: The names of requests that nobody waits for.
        left: The entries whose generations have ended.
        asked: Patterns to compile.
        unasked: The numbers of questions that nobody waits for any more.
        closed: The slots of connections that have ended.
        moved: Connections for the hub.
        report: The answer to `wants_report`, which also comes without a question.
        is_ready: It can answer requests.
    """

    entries: list[Entry] = dataclasses.field(default_factory=list)
    begun: list[Begun] = dataclasses.field(default_factory=list)
    aborts: list[str] = dataclasses.field(default_factory=list)
    left: list[int] = dataclasses.field(default_factory=list)
    asked: list[Asked] = dataclasses.field(default_factory=list)
    unasked: list[int] = dataclasses.field(default_factory=list)
    closed: list[int] = dataclasses.field(default_factory=list)
    moved: list[Moved] = dataclasses.field(default_factory=list)
    report: Report | None = None
    is_ready: bool = False


@dataclasses.dataclass(slots=True, kw_only=True)
class FromHub:
    """From the hub.

    Attributes:
        info: The model, once it is loaded.
        outputs: Of requests, under the worker's names; lists of them in msgpack come as the engine has sent them.
        failures: Why requests have ended, by the worker's names.
        compiled: The answers to what was asked.
        wants_report: A report is wanted.
        is_ending: Responses end their connections from now on.
        stop: The process shall end.
    """

    info: ModelInfo | None = None
    outputs: list[RequestOutput | bytes] = dataclasses.field(default_factory=list)
    failures: list[tuple[str, Failure]] = dataclasses.field(default_factory=list)
    compiled: list[Compiled] = dataclasses.field(default_factory=list)
    wants_report: bool = False
    is_ending: bool = False
    stop: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStart:
    """The one argument of a worker process, as JSON.

    Attributes:
        number: Which worker it is, from 1 on; workers that follow one another in a place have one number.
        name: What the names of its requests begin with: see `Passing`.
        seed: The seed of its requests that give none.
        engine, server: The options.
        tokenizer_dir, model_dir: The directories of the files that it reads.
        address: ZeroMQ address of the hub.
        connections_fd: The socket through which connections come.
        table_fd: The memory of the table of connections.
        parent_pid: The hub's process.
    """

    number: int
    name: str
    seed: int
    engine: EngineConfig
    server: ServerConfig
    tokenizer_dir: str
    model_dir: str | None
    address: str
    connections_fd: int
    table_fd: int
    parent_pid: int
