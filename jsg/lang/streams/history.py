"""What happened in a run of a program: its calls of the model, which its states show, and its failures."""

import asyncio
import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jsg.errors import AbortedError, JsgError
from jsg.lang.streams.ops import ExprOp, Place
from jsg.lang.streams.places import raised_place
from jsg.lang.words.ir import Gen, Select

logger = logging.getLogger(__name__)

_MAX_SHOWN = 500  # characters of an error


_TOKENS = ("prompt_tokens", "completion_tokens", "cached_tokens")


@dataclasses.dataclass(slots=True)
class Call:
    """A call of the model.

    Attributes:
        kind: "gen" or "select".
        name: The variable that it sets, or None.
        place: The program's statement, or None.
        start: When it began, on the monotonic clock.
        end: When it ended; None while it runs.
        meta: The report of the backend; None while it runs, and if it failed.
        error: What kept it from its end.
    """

    kind: str
    name: str | None
    place: Place | None
    start: float
    end: float | None = None
    meta: Mapping[str, Any] | None = None
    error: str | None = None


class History:
    """The calls of a run and of the programs that it called, and its own failures.

    When it goes, a failure that nobody has read is logged, so that no failed run looks done. It keeps the texts of
    errors and not the errors, whose tracebacks reference it.
    """

    def __init__(self, caller: "History | None" = None, *, is_watched: bool = True) -> None:
        """Begins now.

        Args:
            caller: The history of the run that called this one, which gets its calls too.
            is_watched: Whether this process reads the run: failures that nobody has read are logged.
        """
        self._start = time.monotonic()
        self._calls: list[Call] = []
        self._changed = asyncio.Event()
        own = (self._calls, self._changed)
        self._logs: tuple[tuple[list[Call], asyncio.Event], ...] = (own, *(() if caller is None else caller._logs))
        self._known: set[int] = set()  # identities of errors
        self._unread: list[str] = []
        self._is_watched = is_watched
        if is_watched:
            weakref.finalize(self, _log_unread, self._unread)

    @contextlib.contextmanager
    def calling(self, *ops: ExprOp) -> Iterator[Sequence[Call]]:
        """Surrounds a call of the model, which may answer several gens. The block sets `meta` of each."""
        now = time.monotonic()
        calls = [_call_of(op, now) for op in ops]
        for calls_so_far, _ in self._logs:
            calls_so_far += calls
        self._tell()
        try:
            yield calls
        except BaseException as error:
            for call in calls:
                call.error = type(error).__name__
            raise
        finally:
            for call in calls:
                call.end = time.monotonic()
            self._tell()

    def _tell(self) -> None:
        for _, changed in self._logs:
            changed.set()

    async def changes(self) -> AsyncIterator[tuple[int, dict[str, Any]]]:
        """Gives calls that have begun or ended since the last turn, with their indices, as `timeline` shows them.

        For one reader, on the loop of the run. It never ends by itself.
        """
        num_shown, running = 0, set[int]()
        while True:
            await self._changed.wait()
            self._changed.clear()
            fresh = range(num_shown, len(self._calls))
            num_shown = len(self._calls)
            for index in sorted(running | set(fresh)):
                has_ended = self._calls[index].end is not None
                if index in fresh or has_ended:
                    yield index, self._shown(self._calls[index])
                (running.discard if has_ended else running.add)(index)

    def usage(self) -> dict[str, int]:
        """Gives the number of calls that have ended well, and the sums of their tokens."""
        return usage_of(call.meta for call in tuple(self._calls))

    def timeline(self) -> list[dict[str, Any]]:
        """Gives the calls in the order in which they began. Times are in seconds since the beginning of the run."""
        return [self._shown(call) for call in tuple(self._calls)]

    def _shown(self, call: Call) -> dict[str, Any]:
        meta, end = call.meta or {}, call.end
        return {
            "name": call.name,
            "kind": call.kind,
            "line": None if call.place is None else f"{Path(call.place.file).name}:{call.place.line}",
            "node": None if call.place is None else call.place.node,
            "start_s": round(call.start - self._start, 6),
            "end_s": None if end is None else round(end - self._start, 6),
            **{name: meta.get(name) for name in _TOKENS},
            "error": call.error,
        }

    def failed(self, error: BaseException, *, is_new: bool = False) -> None:
        """Notes a failure of a stream or of the body.

        Args:
            error: The error.
            is_new: Whether it counts as unread though it was read before. A body that reads an error and raises it
                again has shown it to nobody outside.
        """
        if not isinstance(error, Exception) or isinstance(error, AbortedError):
            return  # interrupts are raised elsewhere, and who cancels knows it
        if is_new or id(error) not in self._known:
            self._known.add(id(error))
            text = f"{type(error).__name__}: {error}"
            shown = text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"
            place = raised_place(error)
            where = [] if place is None else ["in the program: {}:{}".format(*place)]
            self._unread.append("; ".join([shown, *(getattr(error, "__notes__", None) or where)]))

    def let_go(self, error: BaseException) -> None:
        """Drops what an error was raised in, where nobody reads the errors of the run but as text.

        The frames of its traceback reference the run, which holds the error. So a full collection would have to find
        each run that failed. Errors that are no `JsgError` are bugs, and are logged with all.
        """
        if not self._is_watched and isinstance(error, JsgError):
            error.__traceback__ = error.__cause__ = error.__context__ = None

    def read(self, error: BaseException) -> None:
        """Notes that a reader has learned of an error. Whoever knows of one knows that the run has failed."""
        if id(error) in self._known:
            self._unread.clear()


def _call_of(op: ExprOp, now: float) -> Call:
    assert isinstance(op.expr, Gen | Select), "only these call the model"
    return Call("gen" if isinstance(op.expr, Gen) else "select", op.expr.name, op.place, now)


def usage_of(metas: Iterable[Mapping[str, Any] | None]) -> dict[str, int]:
    """Sums up the calls of the model and their tokens, from the reports of the variables that they set.

    Remote APIs report how many calls a gen took: none, where the call for a gen before it answered it too.
    """
    reported = {id(meta): meta for meta in _reports(metas)}  # a gen's reasoning has the same as its answer
    total = {"calls": sum(meta.get("api_calls", 1) for meta in reported.values())}
    for name in _TOKENS:
        values = [meta.get(name) for meta in reported.values()]
        total[name] = sum(value for value in values if isinstance(value, int))
    return total


def _reports(metas: Iterable[Mapping[str, Any] | None]) -> Iterator[Mapping[str, Any]]:
    """Gives the reports, and those of the branches in place of that of a joined variable."""
    for meta in metas:
        if meta is not None and "branches" in meta:
            yield from _reports(meta["branches"])
        elif meta is not None:
            yield meta


def _log_unread(unread: list[str]) -> None:
    if unread:
        more = f" (and {len(unread) - 1} more errors)" if unread[1:] else ""
        logger.warning(
            "a program failed, and nobody read its error, which state.error() gives and state.sync() raises: %s%s",
            unread[0],
            more,
        )
