"""Several engine processes behind one front: data parallelism on one machine.

Each engine has its own devices, KV pool and radix tree, and knows nothing of the others. `routing.py` decides which of
them gets a request. An engine that stalls gets no new requests until it goes on. When an engine ends, its requests that
have no output yet are sent to another engine, once each: they keep their seed, so the answer is the same. Its other
requests end with an error, and the other engines go on.
"""

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from jsg.config import EngineConfig
from jsg.engine.child.protocol import ModelInfo, Progress
from jsg.engine.front.children import EngineChild
from jsg.engine.front.client import STOP_GRACE_S, EngineClient
from jsg.engine.front.grammar_compiler import GrammarCompiler
from jsg.engine.front.routing import Reason, Routed, Router
from jsg.engine.front.streams import Sink, name_in_use
from jsg.errors import EngineDeadError, JsgError
from jsg.types import FinishType, Request, RequestOutput

logger = logging.getLogger(__name__)

MAX_MOVES = 1
"""How often a request may move to another engine after its own has ended. It may be the cause, so it moves once."""

OnProgress = Callable[[Progress], None]
_UNDER_WAY = (None, FinishType.STOP, FinishType.LENGTH)


def open_engines(
    children: Sequence[EngineChild], config: EngineConfig, on_progress: OnProgress | None = None
) -> "EngineClient | EngineFleet":
    """The front's side of these engine processes. Must run on the event loop that will use it."""
    if len(children) == 1:
        return EngineClient(children[0], config, on_progress)
    return EngineFleet(children, config, on_progress)


@dataclasses.dataclass(slots=True, eq=False)
class _Live:
    """A request that has begun and not ended.

    Attributes:
        request, owner, sink, options: As `EngineClient.begin` takes them.
        routed: The engine that has it.
        end: Ends it there.
        token_ids: What it has generated.
        has_output: An output of it was passed on, so it cannot begin anew.
        num_moves: How often it has moved.
    """

    request: Request
    owner: str
    sink: Sink
    options: Mapping[str, Any]
    routed: Routed | None = None
    end: Callable[[], None] | None = None
    token_ids: list[int] = dataclasses.field(default_factory=list)
    has_output: bool = False
    num_moves: int = 0


@final
class EngineFleet:
    """Engine processes and the requests that are live in them, with the methods of `EngineClient`.

    Attributes:
        engines: One client for each, in the order of their numbers.
        grammars: Compiles for all of them.

    Invariant: a request has an entry in `_live` from its `begin` until its last output, its abort or its end.
    """

    def __init__(
        self, children: Sequence[EngineChild], config: EngineConfig, on_progress: OnProgress | None = None
    ) -> None:
        """Listens for the engine processes. Must run on the event loop that will use the fleet."""
        self.grammars = GrammarCompiler()
        progress = _JoinedProgress(len(children), on_progress)
        self.engines = tuple(
            EngineClient(child, config, functools.partial(progress.show, number), grammars=self.grammars)
            for number, child in enumerate(children)
        )
        self._live: dict[tuple[str, str], _Live] = {}
        self._is_open = False  # after the start, whose errors are raised, and before the close
        self._watching = [asyncio.ensure_future(self._watch(number)) for number in range(len(children))]

    async def ready(self) -> ModelInfo:
        """Waits until all engines are ready. Raises what the start of any raised, or EngineDeadError."""
        await asyncio.gather(*(engine.ready() for engine in self.engines))
        for engine in self.engines:
            if not engine.is_alive:  # it ended while another one was loading
                raise await engine.death()
        self._is_open = True
        return self.info

    def take_turns(self) -> None:
        """As `EngineClient.take_turns`, in each engine by itself."""
        for engine in self.engines:
            engine.take_turns()

    @property
    def most_requests(self) -> int:
        """How many requests may run and wait in the engines that live."""
        return sum(self.engines[number].most_requests for number in self._living)

    async def death(self) -> EngineDeadError:
        """Waits for the end of the last engine and describes the end of each."""
        errors = await asyncio.gather(*(engine.death() for engine in self.engines))
        ends = "; ".join(f"engine {number}: {error}" for number, error in enumerate(errors))
        return EngineDeadError(f"all engine processes have ended; restart the server ({ends})")

    @functools.cached_property
    def info(self) -> ModelInfo:
        """The loaded model, with batches and pools of all engines added up. Only after `ready`."""
        infos = [engine.info for engine in self.engines]
        return dataclasses.replace(
            infos[0],
            max_running_requests=sum(info.max_running_requests for info in infos),
            max_total_tokens=sum(info.max_total_tokens for info in infos),
            max_request_tokens=min(info.max_request_tokens for info in infos),
        )

    @property
    def is_alive(self) -> bool:
        """Whether an engine is ready and has not ended."""
        return any(engine.is_alive for engine in self.engines)

    @property
    def is_stalled(self) -> bool:
        """Whether no living engine has given a sign of life for some seconds. They may still go on."""
        living = self._living
        return bool(living) and all(self.engines[number].is_stalled for number in living)

    @property
    def takes_grammars(self) -> bool:
        """Whether every living engine has tried to load what grammars need."""
        return all(self.engines[number].takes_grammars for number in self._living)

    @property
    def routed(self) -> Mapping[tuple[int, Reason], int]:
        """Requests that each engine has begun, by the reason for its choice. Only after `ready`."""
        return self._router.routed

    def begin(self, request: Request, owner: str, sink: Sink, **options: Any) -> Callable[[], None]:
        """As `EngineClient.begin`, with an engine that the router chooses."""
        if (owner, request.rid) in self._live:
            raise name_in_use(request.rid)
        live = self._live[owner, request.rid] = _Live(request, owner, sink, options)
        try:
            self._send(live)
        except JsgError:
            self._close(live)
            raise
        return functools.partial(self._end, live)

    def abort(self, rid: str, owner: str = "") -> bool:
        """Ends a live request of the owner; its stream gets a last output. False when there is none of that rid."""
        live = self._live.get((owner, rid))
        return live is not None and live.routed is not None and self.engines[live.routed.engine].abort(rid, owner)

    def abort_all(self, owner: str | None = None, error: JsgError | None = None) -> int:
        """Ends every live request of the owner, of everybody for None, and says how many.

        Their streams get a last output that says "aborted", or `error` if one is given.
        """
        return sum(engine.abort_all(owner, error) for engine in self.engines)

    def live_rids(self, owner: str) -> list[str]:
        """Names of the owner's live requests, oldest first."""
        return [rid for of, rid in self._live if of == owner]

    async def flush_cache(self) -> bool:
        """Empties the prefix cache of every idle engine; False where another engine has requests or stalls."""
        if not self.is_alive:
            raise await self.death()
        return all(await asyncio.gather(*map(self._flush, self._living)))

    async def close(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stops all engine processes, by force after `grace_s`, and ends every stream with EngineDeadError."""
        self._is_open = False
        await asyncio.gather(*(engine.close(grace_s) for engine in self.engines))
        await asyncio.gather(*self._watching)

    @functools.cached_property
    def _router(self) -> Router:
        sizes = [engine.info.max_total_tokens * engine.info.caches_prefixes for engine in self.engines]
        return Router(sizes, self.info.page_size)

    @property
    def _living(self) -> list[int]:
        return [number for number, engine in enumerate(self.engines) if engine.is_alive]

    def _able(self) -> list[int]:
        """Engines that may get a request: those that live and, if there are such, do not stall and have room."""
        able = self._living
        if not able:
            raise EngineDeadError("all engine processes have ended; restart the server, its log says why")
        moving = [number for number in able if not self.engines[number].is_stalled] or able
        return [number for number in moving if not self.engines[number].is_full] or moving

    def _send(self, live: _Live) -> None:
        """Sends a request to an engine. Raises as `EngineClient.begin`."""
        live.routed = routed = self._router.route(live.request, self._able())
        try:
            take = functools.partial(self._take, live)
            live.end = self.engines[routed.engine].begin(live.request, live.owner, take, **live.options)
        except JsgError:
            self._leave(live)
            raise

    def _take(self, live: _Live, output: RequestOutput | Exception) -> None:
        if isinstance(output, Exception):
            self._leave(live)
            error = output
            if isinstance(error, EngineDeadError):
                try:
                    return self._move(live, error)
                except JsgError as ending:
                    error = ending
            self._close(live)
            return live.sink(error)
        live.token_ids += (*output.passed_ids, *output.token_ids)
        if not live.has_output:
            live.has_output = True
            if live.routed is not None and (output.finish and output.finish.type) in _UNDER_WAY:
                self._router.begin(live.routed, output.cached_tokens)
        if output.finish is not None:
            self._leave(live)
            self._close(live)
        return live.sink(output)

    def _move(self, live: _Live, error: EngineDeadError) -> None:
        """Sends a request of a dead engine to another one. Raises the error that ends it where it cannot move."""
        if not self._is_open or not self.is_alive:
            raise error
        if live.has_output or live.request.hold or live.num_moves == MAX_MOVES:
            when = "after its answer had begun" if live.has_output else "before it was done"
            raise EngineDeadError(f"the engine process of this request ended {when}; send it again") from error
        live.num_moves += 1
        self._send(live)

    def _end(self, live: _Live) -> None:
        if live.end is not None:
            live.end()
        self._leave(live)
        self._close(live)

    def _leave(self, live: _Live) -> None:
        """Notes that a request has left its engine."""
        if live.routed is not None:
            self._router.end(live.routed, live.token_ids)
        live.routed = live.end = None

    def _close(self, live: _Live) -> None:
        """Forgets a request. Another request may have its name by now."""
        if self._live.get((live.owner, live.request.rid)) is live:
            del self._live[live.owner, live.request.rid]

    async def _flush(self, number: int) -> bool:
        if self.engines[number].is_stalled:
            return False
        try:
            if not await self.engines[number].flush_cache():
                return False
        except EngineDeadError:
            pass  # its cache is gone too
        self._router.forget(number)
        return True

    async def _watch(self, number: int) -> None:
        """Logs that an engine has ended, and which ones go on."""
        error = await self.engines[number].death()
        if self._is_open:
            others = f"The others go on: {self._living}" if self.is_alive else "No other is left"
            logger.error("engine %d of %d: %s. %s", number, len(self.engines), error, others)


@final
class _JoinedProgress:
    """The progress of several starts as one: adds up how far each engine is in a stage."""

    def __init__(self, num_engines: int, show: OnProgress | None) -> None:
        self._num_engines = num_engines
        self._show = show
        self._stages: dict[str, dict[int, Progress]] = {}

    def show(self, number: int, progress: Progress) -> None:
        """Shows the progress of an engine. Equal plans, as of engines on equal devices, are shown once."""
        if self._show is None:
            return
        told = self._stages.setdefault(progress.stage, {})
        if progress.stage == "plan":
            if progress.text not in {earlier.text for earlier in told.values()}:
                self._show(dataclasses.replace(progress, text=f"engine {number}: {progress.text}"))
            told[number] = progress
            return
        told[number] = progress
        total = max(each.total for each in told.values()) * self._num_engines
        self._show(dataclasses.replace(progress, done=sum(each.done for each in told.values()), total=total))
