"""What a server asks of its engine, which is one process (`client.py`) or several (`fleet.py`)."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from jsg.engine.child.protocol import ModelInfo
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.engine.front.routing import Reason
from jsg.errors import EngineDeadError, JsgError
from jsg.types import Request, RequestOutput


class Generating(Protocol):
    """Requests in, outputs out."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Only after `ready`."""
        ...

    def generate(self, request: Request, owner: str = "", *, is_streamed: bool = True) -> AsyncGenerator[RequestOutput]:
        """Yields the outputs of a request up to the one with `finish`; see `EngineClient.generate`."""
        ...

    def abort(self, rid: str, owner: str = "") -> bool:
        """Ends a live request of the owner; False where none has that rid."""
        ...

    def abort_all(self, owner: str | None = None, error: JsgError | None = None) -> int:
        """Ends every live request of the owner, of everybody for None, and says how many."""
        ...

    def live_rids(self, owner: str) -> list[str]:
        """Names of the owner's live requests, oldest first. Changes nothing."""
        ...


@runtime_checkable
class EngineProcess(Protocol):
    """One engine process as monitoring sees it. No member changes anything."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model. Only after `ready`."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether the engine is ready and has not ended."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether the engine lives, but has given no sign of life for some seconds."""
        ...

    async def stats(self) -> dict[str, int | float]:
        """Counters and gauges. Raises EngineDeadError, or JsgError where the engine fails to count them."""
        ...


@runtime_checkable
class ServedEngine(Generating, Protocol):
    """An engine process or several, and their caches.

    Attributes:
        grammars: Compiles the grammars of requests.
    """

    grammars: GrammarCompiler

    @property
    def is_alive(self) -> bool:
        """Whether requests can be served."""
        ...

    @property
    def is_stalled(self) -> bool:
        """Whether no living engine has given a sign of life for some seconds."""
        ...

    @property
    def engines(self) -> Sequence[EngineProcess]:
        """The processes."""
        ...

    @property
    def routed(self) -> Mapping[tuple[int, Reason], int]:
        """Requests that each engine has begun, by the reason for its choice; empty for one engine."""
        ...

    async def flush_cache(self) -> bool:
        """Empties the prefix cache; False when requests run or wait. Raises EngineDeadError."""
        ...

    async def dump_cache(self, max_depth: int, max_nodes: int) -> dict[str, Any]:
        """The shape of the prefix cache, without any token. Raises JsgError."""
        ...

    async def ready(self) -> ModelInfo:
        """Waits for the end of the warm-up. Raises what the start raised, or EngineDeadError."""
        ...

    async def death(self) -> EngineDeadError:
        """Waits until no request can be served any more; returns an error that says why."""
        ...

    async def close(self, grace_s: float = ...) -> None:
        """Stops every process, by force after `grace_s`, and ends every stream with EngineDeadError."""
        ...
