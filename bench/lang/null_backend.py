"""A backend that answers at once, so that only the interpreter costs time. It can also hold answers back on demand."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jsg.lang.words.backend import Piece, PromptItem, Selection
from jsg.lang.words.ir import Gen, Select, Text

ANSWER = "answer"
META = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "finish_reason": {"type": "stop"}}


class NullBackend:
    """Counts the gens that wait, and keeps them waiting while its gate is closed.

    Attributes:
        num_waiting: The number of gens that wait.
        is_gated: Whether gens wait for `release`. It must be set before the first session is opened.
    """

    def __init__(self, *, is_gated: bool = False):
        self.num_waiting = 0
        self.is_gated = is_gated
        self._gate: asyncio.Event | None = None

    def open(self, *, num_api_spec_tokens: int | None = None) -> "NullSession":
        """Opens a session."""
        return NullSession(self)

    async def flush_cache(self) -> bool:
        """Does nothing, because there is no cache."""
        return True

    async def server_info(self) -> dict[str, Any]:
        """The name of the backend."""
        return {"model": "null"}

    async def close(self) -> None:
        """Does nothing, because nothing is open."""

    async def passed(self) -> None:
        """Waits for the gate if there is one. Its event belongs to the event loop of the programs."""
        if self.is_gated:
            self._gate = self._gate or asyncio.Event()
            self.num_waiting += 1
            await self._gate.wait()
            self.num_waiting -= 1

    async def release(self) -> None:
        """Opens the gate. It must be called on the event loop of the programs."""
        assert self._gate is not None, "nobody waits"
        self._gate.set()


class NullSession:
    """Stores only the length of its text."""

    def __init__(self, backend: NullBackend, num_chars: int = 0):
        self._backend = backend
        self.num_chars = num_chars

    async def extend(self, item: PromptItem) -> str:
        """Adds the length of the text. Markers of turns do not count here."""
        text = item.text if isinstance(item, Text) else ""
        self.num_chars += len(text)
        return text

    async def generate(self, gen: Gen) -> AsyncIterator[Piece]:
        """Answers with one piece."""
        await self._backend.passed()
        self.num_chars += len(ANSWER)
        yield Piece(ANSWER, META)

    async def select(self, select: Select) -> Selection:
        """Takes the first choice."""
        await self._backend.passed()
        share = 1 / len(select.choices)
        return Selection(select.choices[0], (share,) * len(select.choices), META)

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "list[NullSession]":
        """Makes copies."""
        return [NullSession(self._backend, self.num_chars) for _ in range(size)]

    async def join(self, branches: Sequence[Any]) -> None:
        """Adds the lengths of the branches."""
        self.num_chars += sum(branch.num_chars - self.num_chars for branch in branches)

    async def close(self) -> None:
        """Does nothing, because nothing is stored."""
