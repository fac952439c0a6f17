"""The log of a process of the server. Standard library only.

Each line on stderr is of one form: the time, the level, the process, and the text. In a server another process,
`log_relay.py`, reads them all and gives this form, or JSON, also to the lines that no logger of jsg has written.
"""

import atexit
import io
import logging
import os
import select
import subprocess
import sys
import threading
from typing import Any, final, override

from jsg.engine.child import log_relay

STDERR = 2
CLOSE_S = 2.0  # a slow reader of stderr holds up the end of the server no longer
UNCAUGHT = "the process ends because of an error that nothing handles"

logger = logging.getLogger(__name__)
_START = logging.getLogger("jsg.start")


@final
class LineFormatter(logging.Formatter):
    """Gives each line of a record time, level and source."""

    def __init__(self, source: str) -> None:
        super().__init__("%(message)s")
        self._source = source

    @override
    def format(self, record: logging.LogRecord) -> str:
        """The lines of a record."""
        text = super().format(record).rstrip("\n")
        return "\n".join(log_relay.text_lines(record.created, record.levelname, self._source, text))


def log_to_stderr(source: str) -> None:
    """Has this process write its log, Python's warnings and the traces of uncaught exceptions in the form of the log.

    `source` is the name of the process in its lines. A record is one write, so that processes do not mix theirs.
    """
    stream = io.TextIOWrapper(io.FileIO(STDERR, "w", closefd=False), "utf-8", "backslashreplace", write_through=True)  # pyright: ignore[reportArgumentType] # as Python's own -u
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(source))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(True)
    sys.excepthook = lambda kind, error, trace: logger.critical(UNCAUGHT, exc_info=(kind, error, trace))
    threading.excepthook = _log_of_thread


def _log_of_thread(args: Any) -> None:
    name = args.thread.name if args.thread is not None else "?"
    logger.error(
        "the thread %s ended because of an error", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback)
    )


@final
class ServerLog:
    """The log process of a server, to which this process and those that it starts write their stderr.

    Attributes:
        terminal: The stderr that this process had before, for what is no line, such as a bar.
    """

    def __init__(self, log_format: str, source: str) -> None:
        """Starts the log process, which ends after the last process that writes to it, and calls `log_to_stderr`."""
        reading_fd, writing_fd = os.pipe()
        # Without site and the environment it starts fast; in a group of its own Ctrl-C does not reach it.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", log_relay.__file__, log_format],
            stdin=reading_fd,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        os.close(reading_fd)
        sys.stderr.flush()
        self.terminal = os.fdopen(os.dup(STDERR), "w")
        os.dup2(writing_fd, STDERR)
        os.close(writing_fd)
        self._is_open = True
        log_to_stderr(source)
        _START.setLevel(logging.INFO)
        atexit.register(self.close)

    def say(self, text: str) -> None:
        """Logs what is no warning, such as a plan."""
        _START.info("%s", text)

    def close(self) -> None:
        """Waits until all that this process wrote is written out, and gives it back the stderr that it had before."""
        if not self._is_open:
            return
        self._is_open = False
        sys.stderr.flush()
        os.write(STDERR, log_relay.END + b"\n")
        assert self._process.stdout is not None, "it is a pipe"
        select.select([self._process.stdout], [], [], CLOSE_S)
        os.dup2(self.terminal.fileno(), STDERR)
