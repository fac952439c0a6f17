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
    """The only thread that touches the core. Everything else reaches it through a list of things to do."""

    def __init__(self, core: EngineCore):
        self._core = core
        self._sinks: dict[str, Sink] = {}
        self._to_do: list[Callable[[], None]] = []
        self._wake = threading.Condition()
        self._is_closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="jsg-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> None:
        """Runs a request; a refusal goes to the sink."""

        def add() -> None:
            try:
                self._core.add(request)
            except JsgError as error:
                sink(error)
            else:
                self._sinks[request.rid] = sink

        self._enqueue(add)

    def abort(self, rid: str) -> None:
        """Ends a request; its sink hears nothing more."""

        def abort() -> None:
            self._sinks.pop(rid, None)
            self._core.abort(rid)

        self._enqueue(abort)

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

    @property
    def is_closed(self) -> bool:
        """Whether it was closed or failed."""
        return self._is_closing or self._failure is not None

    def close(self) -> None:
        """Ends the thread and frees the core. Requests that still run hear an error."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        self._thread.join()

    def _enqueue(self, action: Callable[[], None]) -> None:
        with self._wake:
            if self._is_closing or self._failure is not None:
                raise EngineDeadError("the engine is closed" if self._is_closing else "the engine failed") from (
                    self._failure
                )
            self._to_do.append(action)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._take_actions():
                for output in self._core.step() if self._core.has_work else ():
                    sink = self._sinks.get(output.rid)
                    if output.finish is not None:
                        self._sinks.pop(output.rid, None)
                    if sink is not None:
                        sink(output)
        except Exception as failure:
            self._failure = failure
        finally:
            self._end()

    def _take_actions(self) -> bool:
        """Does what has been asked for, waiting for it when there is nothing else to do; False to end."""
        with self._wake:
            while not (self._to_do or self._is_closing or self._core.has_work):
                self._wake.wait()
            actions, self._to_do = self._to_do, []
            if self._is_closing:
                return False
        for action in actions:
            action()
        return True

    def _end(self) -> None:
        with self._wake:
            self._is_closing |= self._failure is None
            actions, self._to_do = self._to_do, []
        self._core.close()
        for action in actions:
            action()  # questions are still answered, requests are told below
        error = EngineDeadError(f"the engine failed: {self._failure}" if self._failure else "the engine was closed")
        error.__cause__ = self._failure
        for sink in self._sinks.values():
            sink(error)
