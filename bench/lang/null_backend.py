"""A backend that answers at once, so that what is left is the interpreter; or not before it is told to."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jsg.lang.backend import Piece, PromptItem, Selection
from jsg.lang.ir import Gen, Select, Text

ANSWER = "answer"
META = {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0, "finish_reason": {"type": "stop"}}


class NullBackend:
    """Counts the gens that wait, and holds them back while its gate is closed.

    Attributes:
        num_waiting: Gens that are under way.
        is_gated: Whether gens wait for `release`. To be set before the first session is opened.
    """

    def __init__(self, *, is_gated: bool = False):
        self.num_waiting = 0
        self.is_gated = is_gated
        self._gate: asyncio.Event | None = None

    def open(self, *, num_api_spec_tokens: int | None = None) -> "NullSession":
        """A session."""
        return NullSession(self)

    async def flush_cache(self) -> bool:
        """There is none."""
        return True

    async def server_info(self) -> dict[str, Any]:
        """Its name."""
        return {"model": "null"}

    async def close(self) -> None:
        """Nothing is open."""

    async def passed(self) -> None:
        """Waits for the gate, where there is one. The event belongs to the loop on which the programs run."""
        if self.is_gated:
            self._gate = self._gate or asyncio.Event()
            self.num_waiting += 1
            await self._gate.wait()
            self.num_waiting -= 1

    async def release(self) -> None:
        """Opens the gate; to be called on the loop of the programs."""
        assert self._gate is not None, "nobody waits"
        self._gate.set()


class NullSession:
    """Keeps nothing but the length of its text."""

    def __init__(self, backend: NullBackend, num_chars: int = 0):
        self._backend = backend
        self.num_chars = num_chars

    async def extend(self, item: PromptItem) -> str:
        """Markers of a turn are not text here."""
        text = item.text if isinstance(item, Text) else ""
        self.num_chars += len(text)
        return text

    async def generate(self, gen: Gen) -> AsyncIterator[Piece]:
        """One piece."""
        await self._backend.passed()
        self.num_chars += len(ANSWER)
        yield Piece(ANSWER, META)

    async def select(self, select: Select) -> Selection:
        """The first choice."""
        await self._backend.passed()
        share = 1 / len(select.choices)
        return Selection(select.choices[0], (share,) * len(select.choices), META)

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "list[NullSession]":
        """Copies."""
        return [NullSession(self._backend, self.num_chars) for _ in range(size)]

    async def join(self, branches: "Sequence[NullSession]") -> None:
        """Adds their lengths."""
        self.num_chars += sum(branch.num_chars - self.num_chars for branch in branches)

    async def close(self) -> None:
        """Nothing is held."""
