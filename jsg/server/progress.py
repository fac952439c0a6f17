"""Progress of a start or of a conversion, for people: bars on stderr, plans as text."""

import time
from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jsg.engine.child import protocol


@final
class StartDisplay:
    """Shows `protocol.Progress` records as they come. Used as a context; without a terminal it prints plans only."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bars = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def show(self, progress: protocol.Progress) -> None:
        """Moves the stage's bar; the plan is a text to print."""
        if progress.stage == "plan":
            self._console.print(progress.text, markup=False, soft_wrap=True)
            return
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(progress.stage, total=progress.total, text="")
        self._bars.update(
            self._tasks[progress.stage], completed=progress.done, total=progress.total, text=progress.text
        )


@final
class ByteDisplay:
    """Shows how many bytes are done and how fast. Used as a context; without a terminal, a line for each tenth."""

    def __init__(self, stage: str) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description:>8}"),
            BarColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._stage, self._task = stage, self._bar.add_task(stage, total=None, text="")
        self._started_at, self._tenths = time.monotonic(), 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        """Moves the bar; both in bytes."""
        rate = done / 1e9 / max(time.monotonic() - self._started_at, 1e-9)
        text = f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB, {rate:.2f} GB/s"
        self._bar.update(self._task, completed=done, total=total, text=text)
        tenths = 10 * done // max(total, 1)
        if not self._console.is_terminal and tenths > self._tenths:
            self._tenths = tenths
            self._console.print(f"{self._stage}: {text}", markup=False, soft_wrap=True)
