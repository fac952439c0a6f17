"""The progress of a start or of a conversion, for people: bars on stderr, plans as text."""

import functools
import time
from contextlib import ExitStack
from typing import final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TaskID, TextColumn, TimeElapsedColumn

from jsg.engine.child import protocol
from jsg.engine.child.log import ServerLog

_TEXT = TextColumn("{task.fields[text]}")


@final
class StartDisplay(ExitStack):
    """Shows `protocol.Progress` records until its context ends. Without a terminal it prints plans only."""

    def __init__(self, log: ServerLog | None = None) -> None:
        """Shows both on stderr. Where there is a log, plans go there, and bars to its terminal."""
        super().__init__()
        self._console = Console(file=log and log.terminal, stderr=log is None, highlight=False)
        self._say = log.say if log else functools.partial(self._console.print, markup=False, soft_wrap=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), _TEXT)
        self._bars = self.enter_context(_bars(self._console, *columns))
        self._tasks: dict[str, TaskID] = {}

    def show(self, progress: protocol.Progress) -> None:
        """Moves the stage's bar; the plan is a text to print."""
        if progress.stage == "plan":
            self._say(progress.text)
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(progress.stage, total=progress.total, text="")
        self._bars.update(
            self._tasks[progress.stage], completed=progress.done, total=progress.total, text=progress.text
        )


@final
class ByteDisplay(ExitStack):
    """Shows how many bytes are done and how fast, until its context ends. Without a terminal: a line for each tenth."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self._console = Console(stderr=True, highlight=False)
        self._bar = self.enter_context(_bars(self._console, BarColumn(), _TEXT, TimeElapsedColumn()))
        self._stage, self._task = stage, self._bar.add_task(stage, total=None, text="")
        self._started_at, self._tenths = time.monotonic(), 0

    def show(self, done: int, total: int) -> None:
        """Moves the bar; both in bytes."""
        rate = done / 1e9 / max(time.monotonic() - self._started_at, 1e-9)
        text = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB, {rate:.2f} GB/s"
        self._bar.update(self._task, completed=done, total=total, text=text)
        tenths = 10 * done // max(total, 1)
        if not self._console.is_terminal and tenths > self._tenths:
            self._tenths = tenths
            self._console.print(f"{self._stage}: {text}", markup=False, soft_wrap=True)


def _bars(console: Console, *columns: ProgressColumn) -> Progress:
    """Bars that show on a terminal only."""
    return Progress(TextColumn("{task.description:>8}"), *columns, console=console, disable=not console.is_terminal)
