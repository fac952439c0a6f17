"""A thread that steps an engine core for callers in other threads of the same process."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jsg.engine.core import EngineCore
from jsg.errors import EngineDeadError, JsgError
from jsg.types import Request, RequestOutput

Sink = Callable[[RequestOutput | JsgError], None]
"""Takes the outputs of one request on the driver's thread. The last one has a finish, or is an error."""

IDLE_POLL_S = 0.25
"""How often the thread looks for programs that were compiled while nothing runs, until all are."""


class Driver:
    """The only thread that touches the core. All other threads reach the core through a list of actions.

    Invariant: a submitted request has a sink until the sink has got the last output. A sink that raises is dropped, and
    its request is aborted. A request that cannot be added fails alone. Any other action or step that raises ends the
    engine, and every sink gets the error.
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
        """Whether the engine was closed or has failed."""
        return self._is_closing or self._failure is not None

    def submit(self, request: Request, sink: Sink) -> None:
        """Runs a request. A refusal goes to the sink. Raises EngineDeadError if the engine is closed."""
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
        """Ends a request; its sink gets no more outputs. Does nothing if the engine is closed and has ended it."""

        def abort() -> None:
            self._sinks.pop(rid, None)
            self._core.abort(rid)

        if not self.is_closed:
            self._enqueue(abort)

    def tell(self, news: Callable[[EngineCore], None]) -> None:
        """Tells the core something before later requests reach it. Raises EngineDeadError if the engine is closed."""
        self._enqueue(lambda: news(self._core))

    def call(self, question: Callable[[EngineCore], Any]) -> Any:
        """Asks the core something between two steps and returns the answer."""
        answer: Future[Any] = Future()

        def ask() -> None:
            try:
                answer.set_result(question(self._core))
            except Exception as error:
                answer.set_exception(error)

        self._enqueue(ask)
        return answer.result()

    def wait_for_grammars(self) -> None:
        """Returns when the core can take requests with grammars. An earlier one would hold up all others."""
        self._core.grammars.wait()  # which any thread may do

    def close(self) -> None:
        """Ends the thread and frees the core. Requests that still run get an error; questions are answered."""
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
        """Runs the actions in the list. Waits for one if the core has no work, which it may get from its compiler."""
        with self._wake:
            while not (self._to_do or self._is_closing or self._core.has_work):
                self._wake.wait(None if self._core.is_settled else IDLE_POLL_S)
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
        except Exception:  # its owner is gone, as a closed event loop is; other requests go on
            self._sinks.pop(rid, None)
            self._core.abort(rid)

    def _end(self) -> None:
        """Leaves no caller waiting: answers all questions, and ends all requests."""
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
