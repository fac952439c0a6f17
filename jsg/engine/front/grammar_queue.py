"""Which grammar is compiled next: owners take turns, and no grammar waits long behind a slow one.

    owner a ──▶ ▢▢▢▢▢▢ ─┐
    owner b ──▶ ▢       ├─ one of each in turn ──▶ AT_ONCE processes, and one more for each that is slow:
    owner c ──▶ ▢▢     ─┘                          MOST_AT_ONCE in all, one of which an owner leaves to others

A grammar that nobody waits for any more leaves its line, and if it is slow, its process too. A grammar that has waited
too long is refused.
"""

import asyncio
import copy
import dataclasses
import math
from asyncio import Event, Task
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from typing import final

from jsg.constrained.text_patterns import PatternSet
from jsg.errors import JsgError, QueueFullError
from jsg.types import GrammarSpec

AT_ONCE = 2
MOST_AT_ONCE = 4
QUICK_S = 0.5
"""A grammar that takes longer is slow. Nearly all take milliseconds and must not wait for the few that do not."""
WAIT_S = 10.0
"""A grammar that waits longer for a process, while no quick one was compiled, is refused: a client can wait by itself,
and may be gone."""
MOST_WAITS = 6
"""However many quick ones come before it, a grammar waits so many times `WAIT_S` at most."""
MAX_WAITING = 1000
"""Grammars of one owner that may wait."""


@dataclasses.dataclass(slots=True, eq=False)
class _Job[Result]:
    """One grammar or set of patterns, and the callers that wait for it.

    Attributes:
        spec: The grammar or the patterns.
        owners: The owners in whose lines it stands.
        num_asking: Callers that wait for it.
        begun: Set when it has a process, or never will have one.
        task: Its compilation, once it has begun.
        is_slow: It has had its process for longer than a quick one needs.
    """

    spec: GrammarSpec | PatternSet
    owners: set[str] = dataclasses.field(default_factory=set)
    num_asking: int = 0
    begun: Event = dataclasses.field(default_factory=Event)
    task: Task[Result] | None = None
    is_slow: bool = False


@final
class GrammarQueue[Worker, Result]:
    """Hands each grammar to a worker once, however many callers ask for it. Everything happens on one event loop.

    Invariants: a job is in the lines of its owners until it begins or nobody asks for it any more; no line is empty.
    """

    def __init__(
        self,
        take: Callable[[], Awaitable[Worker]],
        compile: Callable[[Worker, GrammarSpec | PatternSet], Awaitable[Result]],
        *,
        wait_s: float = WAIT_S,
        quick_s: float = QUICK_S,
    ) -> None:
        """Makes an empty queue.

        Args:
            take: Gives a worker, which may take a while.
            compile: Has a worker compile a grammar. Every caller that asked for the grammar gets what either raises.
            wait_s: How long a grammar may wait until it begins, while no quick one is compiled.
            quick_s: How long a grammar may have its worker until it counts as slow.
        """
        self._take = take
        self._compile = compile
        self._wait_s = wait_s
        self._quick_s = quick_s
        self._jobs: dict[str, _Job[Result]] = {}
        self._lines: OrderedDict[str, OrderedDict[str, _Job[Result]]] = OrderedDict()
        self._begun = Counter[str]()  # by the owner whose turn it took
        self._num_slow = 0
        self._quick_at = -math.inf  # when a quick one was compiled last
        self._has_worker = False
        self._is_closed = False

    async def run(self, spec: GrammarSpec | PatternSet, owner: str) -> Result:
        """Compiles a grammar. If nobody waits for it any more, a compilation that is slow ends; a quick one goes on.

        Raises:
            QueueFullError: Too many grammars of this owner wait, or this one has waited too long.
            JsgError: The queue was closed before it began.
        """
        if self._is_closed:
            raise JsgError("the server is ending")
        job = self._jobs.get(spec.key) or _Job[Result](spec)
        self._line_up(job, owner)
        job.num_asking += 1
        try:
            self._begin_some()
            return await asyncio.shield(await self._begin_of(job))
        except JsgError as error:
            raise copy.copy(error) from error  # each caller has its own, because raising an error writes to it
        finally:
            job.num_asking -= 1
            self._end_unwanted(job)

    def close(self) -> None:
        """Lets no grammar begin any more; those that wait fail."""
        self._is_closed = True
        for job in self._jobs.values():
            job.begun.set()

    def _line_up(self, job: _Job[Result], owner: str) -> None:
        """Puts a job that has not begun at the end of the owner's line, unless it is in it."""
        if job.task is not None or owner in job.owners:
            return
        line = self._lines.get(owner, OrderedDict())
        if len(line) >= MAX_WAITING:
            raise QueueFullError(f"at most {MAX_WAITING} grammars may wait to be compiled, and so many do; try later")
        self._lines.setdefault(owner, line)[job.spec.key] = job
        self._jobs[job.spec.key] = job
        job.owners.add(owner)

    async def _begin_of(self, job: _Job[Result]) -> Task[Result]:
        loop = asyncio.get_running_loop()
        most_at = loop.time() + MOST_WAITS * self._wait_s
        while not job.begun.is_set():
            try:
                async with asyncio.timeout(self._wait_s):
                    await job.begun.wait()
            except TimeoutError:
                now = loop.time()
                goes_on = now < self._quick_at + self._wait_s and now < most_at
                if self._has_worker and not goes_on:  # nothing else is to blame before a worker has started
                    break
        if job.task is not None:
            return job.task
        if self._is_closed:
            raise JsgError("the server is ending")
        raise QueueFullError(
            f"a grammar may wait {self._wait_s:g} s to be compiled, but others still come before it; try again later"
        )

    def _begin_some(self) -> None:
        """Lets jobs begin, as many as may be under way."""
        while not self._is_closed and (owner := self._next_owner()) is not None:
            self._lines.move_to_end(owner)
            job = next(iter(self._lines[owner].values()))
            self._leave_lines(job)
            self._begun[owner] += 1
            job.task = asyncio.create_task(self._do(job, owner))
            job.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # maybe nobody waits for it
            job.begun.set()

    def _next_owner(self) -> str | None:
        """The owner whose turn it is; None while no job may begin."""
        num_begun = self._begun.total()
        if num_begun >= MOST_AT_ONCE or num_begun - self._num_slow >= AT_ONCE:
            return None
        return next((owner for owner in self._lines if self._begun[owner] < MOST_AT_ONCE - 1), None)

    async def _do(self, job: _Job[Result], owner: str) -> Result:
        def slow() -> None:
            job.is_slow = True
            self._num_slow += 1
            self._end_unwanted(job)
            self._begin_some()

        timer: asyncio.TimerHandle | None = None
        try:
            worker = await self._take()
            self._has_worker = True
            timer = asyncio.get_running_loop().call_later(self._quick_s, slow)
            return await self._compile(worker, job.spec)
        finally:
            if timer is not None:
                timer.cancel()
                if not job.is_slow:
                    self._quick_at = asyncio.get_running_loop().time()
            self._num_slow -= job.is_slow
            self._begun[owner] -= 1
            if not self._begun[owner]:
                del self._begun[owner]
            self._forget(job)
            self._begin_some()

    def _end_unwanted(self, job: _Job[Result]) -> None:
        """Ends a job that nobody waits for, unless it is about to end by itself and others may want its result."""
        if job.num_asking or (job.task is not None and not job.is_slow):
            return
        self._leave_lines(job)
        self._forget(job)  # whoever asks from now on gets a new one
        if job.task is not None:
            job.task.cancel()

    def _forget(self, job: _Job[Result]) -> None:
        if self._jobs.get(job.spec.key) is job:
            del self._jobs[job.spec.key]

    def _leave_lines(self, job: _Job[Result]) -> None:
        for owner in job.owners:
            line = self._lines[owner]
            del line[job.spec.key]
            if not line:
                del self._lines[owner]
        job.owners.clear()
