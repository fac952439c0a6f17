"""One `jsg serve` as a child of a Ray process. It needs no Ray."""

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import final

STOP_S = 25.0  # more than --shutdown-timeout


@final
class Child:
    """A process group that ends with this process (`--exit-with-parent`)."""

    def __init__(self, command: Sequence[str], on_end: Callable[[int], None]) -> None:
        """Starts the command. `on_end` is called in a thread with the exit status, unless `stop` has ended it."""
        self._process = subprocess.Popen(command, start_new_session=True)
        self._is_stopping = False
        self._on_end = on_end
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def stop(self) -> None:
        """Ends it as SIGTERM does, and by force where that takes too long."""
        self._is_stopping = True
        self._signal(signal.SIGTERM)
        self._watching.join(STOP_S)
        if self._watching.is_alive():
            self._signal(signal.SIGKILL)
            self._watching.join()

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _watch(self) -> None:
        status = self._process.wait()
        if not self._is_stopping:
            self._on_end(status)
