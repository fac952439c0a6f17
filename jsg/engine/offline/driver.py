"""A thread that steps an engine core for callers in other threads of the same process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jsg.engine.core import EngineCore
from jsg.errors import EngineDeadError, JsgError
from jsg.types import Request, RequestOutput

Sink = Callable[[RequestOutput | JsgError], None]
"""Takes the outputs of one request, on the driver's thread; the last has a finish, or is the error that ended it."""


class Driver:
    """The only thread that touches the core. Everything else reaches it through a list of things to do.

    Invariant: a request that was submitted has a sink until that sink has heard its end. A sink that raises is dropped
    and its request aborted. A request that cannot be added, whatever the core raises, fails alone; any other action or
    a step that raises something unexpected ends the engine, and every sink hears of it.
    """

    def __init__(self, core: EngineCore):
        self._core = core
        self._sinks: dict[str, Sink] = {}
        self._to_do: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="jsg-engine", daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed or failed."""
        return self._is_closing or self._failure is not None

    def submit(self, request: Request, sink: Sink) -> None:
        """Runs a request; a refusal goes to the sink. Raises EngineDeadError when the engine is closed."""
        rid = request.rid

        def add() -> None:
            if rid in self._sinks:
                sink(JsgError(f"the engine already runs a request {rid!r}"))
                return
            self._sinks[rid] = sink
            try:
                self._core.add(request)
            except JsgError as error:
                self._deliver(rid, error)
            except Exception as bug:  # the core keeps nothing of a request that it could not add
                error = JsgError(f"the engine could not take the request: {bug}")
                error.__cause__ = bug
                self._deliver(rid, error)

        self._enqueue(add)

    def abort(self, rid: str) -> None:
        """Ends a request; its sink hears nothing more. Does nothing when the engine is closed: it ended there."""

        def abort() -> None:
            self._sinks.pop(rid, None)
            self._core.abort(rid)

        if not self.is_closed:
            self._enqueue(abort)

    def tell(self, news: Callable[[EngineCore], None]) -> None:
        """Hands something to the core before whatever is submitted later. Raises EngineDeadError after the end."""
        self._enqueue(lambda: news(self._core))

    def call(self, question: Callable[[EngineCore], Any]) -> Any:
        """Asks the core something between two steps and waits for the answer."""
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(question(self._core))
            except Exception as error:
                answer.set_exception(error)

        self._enqueue(ask)
        return answer.result()

    def wait_for_grammars(self) -> None:
        """Returns when the core can take requests that have a grammar; before, one would hold up all others."""
        self._core.grammars.wait()  # which any thread may do

    def close(self) -> None:
        """Ends the thread and frees the core. Requests that still run hear an error; questions are answered."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _enqueue(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self.is_closed:
                raise self._death()
            self._to_do.append(action)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._act()
                for refusal in self._core.refuse_overdue():
                    self._deliver(refusal.rid, refusal.failure.to_error())
                for output in self._core.step() if self._core.has_work else ():
                    self._deliver(output.rid, output)
        except Exception as failure:
            self._failure = failure
        finally:
            self._end()

    def _act(self) -> None:
        """Does what has been asked for, waiting for it when there is nothing else to do."""
        with self._wake:
            while not (self._to_do or self._is_closing or self._core.has_work):
                self._wake.wait()
        while self._to_do:  # `append` and `pop` are atomic; only this thread pops
            self._to_do.pop(0)()

    def _deliver(self, rid: str, item: RequestOutput | JsgError) -> None:
        sink = self._sinks.get(rid)
        if sink is None:
            return
        if isinstance(item, JsgError) or item.finish is not None:
            del self._sinks[rid]
        try:
            sink(item)
        except Exception:  # its owner is gone, an event loop that was closed for one; nobody else may suffer for it
            self._sinks.pop(rid, None)
            self._core.abort(rid)

    def _end(self) -> None:
        """Nobody is left waiting: questions are answered, and all requests hear the end."""
        with self._wake:
            self._is_closing = True  # from here on nothing is enqueued
        try:
            while self._to_do:
                self._to_do.pop(0)()
        except Exception as failure:
            self._failure = self._failure or failure
        finally:
            for rid in list(self._sinks):
                self._deliver(rid, self._death())
            self._core.close()

    def _death(self) -> EngineDeadError:
        if self._failure is None:
            return EngineDeadError("the engine was closed")
        error = EngineDeadError(f"the engine failed: {self._failure}")
        error.__cause__ = self._failure
        return error
