"""Progress of a start, for people: bars on stderr, plans as text."""

from types import TracebackType
from typing import Self, final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jsg.engine import protocol


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
