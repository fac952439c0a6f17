"""Work that a thread of its own does once, for all who need its result."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import final


@final
class Begun[Result]:
    """Work and its result. Threads may share it. Python's end does not wait for the thread."""

    def __init__(self, name: str, work: Callable[[], Result]) -> None:
        """Begins nothing yet. `name` is that of the thread."""
        self._work = work
        self._future: Future[Result] = Future()
        self._beginning = threading.Lock()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> None:
        """Starts the thread, if nobody has."""
        with self._beginning:
            if self._thread.ident is None:
                self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._future.done()

    def result(self) -> Result:
        """What the work has given, or raises what it has raised. Waits for it, and begins it if nobody has."""
        if not self.is_done:
            self.begin()
        return self._future.result()

    def join(self) -> None:
        """Waits for the end of the thread, if it was started."""
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._future.set_result(self._work())
        except Exception as error:
            self._future.set_exception(error)
