"""`jsg.testing.ScriptedBackend` for our own tests: it watches how sessions are used, and waits when told.

It notes forks, joins and blocks beside the calls of the model, and wants whole turns where a test asks for that.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

from jsg import testing
from jsg.lang.words.backend import Piece, PromptItem, Selection
from jsg.lang.words.ir import Gen, Select, Text
from jsg.testing import Call


class Gate:
    """Closed until a test opens it, from whatever thread. `await gate.passed()` waits on any loop."""

    def __init__(self):
        self._opened: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._num_reached = 0
        self._changed = threading.Condition()

    def open(self) -> None:
        self._opened.set_result(None)

    def wait_reached(self, count: int = 1, timeout: float = 30.0) -> None:
        """Blocks until this number of calls wait at the gate."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_reached >= count, timeout):
                raise TimeoutError(f"{self._num_reached} of {count} came to the gate")

    async def passed(self) -> None:
        with self._changed:
            self._num_reached += 1
            self._changed.notify_all()
        await asyncio.shield(asyncio.wrap_future(self._opened))


class ScriptedBackend:
    """Answers by `answer(prompt, gen)`, chooses by `choose(prompt, select)` (default: the first choice).

    Attributes:
        calls: Every call of a session, in order: "generate", "select", "block", "fork", "join". `what` is the `Gen`,
            the `Select`, the items of a block, the size and the offsets of a fork, the texts of joined branches.
        num_open: Sessions that are open now.
        opened_with: `num_api_spec_tokens` of each session that was opened.
    """

    def __init__(self, answer: Any = "answer", choose: Any = None, *, wants_blocks: bool = False):
        self.inner = testing.ScriptedBackend(answer, choose or (lambda _prompt, select: select.choices[0]))
        self.wants_blocks = wants_blocks
        self.calls: list[Call] = []
        self.num_open = 0
        self.max_open = 0
        self.opened_with: list[int | None] = []
        self.num_flushes = 0
        self._changed = threading.Condition()

    @property
    def aborted(self) -> list[Gen]:
        return self.inner.aborted

    def open(self, *, num_api_spec_tokens: int | None = None) -> "ScriptedSession":
        self.opened_with.append(num_api_spec_tokens)
        return ScriptedSession(self, self.inner.open())

    async def flush_cache(self) -> bool:
        self.num_flushes += 1
        return await self.inner.flush_cache()

    async def server_info(self) -> dict[str, Any]:
        return await self.inner.server_info()

    async def close(self) -> None:
        await self.inner.close()

    def changed(self, num_open: int) -> None:
        """Counts sessions that opened, or closed."""
        with self._changed:
            self.num_open += num_open
            self.max_open = max(self.max_open, self.num_open)
            self._changed.notify_all()

    def wait_closed(self, timeout: float = 30.0) -> None:
        """Blocks until no session is open: they close behind what was read."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_open == 0, timeout):
                raise TimeoutError(f"{self.num_open} sessions stay open")

    def prompts(self, kind: str = "generate") -> list[str]:
        """The prompts of the calls of a kind."""
        return [call.prompt for call in self.calls if call.kind == kind]


class ScriptedSession:
    """A session that must be used as the interface says: one call after the other, and none after the end."""

    def __init__(self, backend: ScriptedBackend, inner: testing.ScriptedSession):
        self._backend = backend
        self._inner = inner
        self._fork_len = len(inner.text)
        self.is_closed = False
        self._is_busy = False
        backend.changed(1)

    @property
    def wants_blocks(self) -> bool:
        return self._backend.wants_blocks

    async def extend(self, item: PromptItem) -> str:
        self._check()
        return await self._inner.extend(item)

    def copy(self) -> "ScriptedSession":
        self._check()
        return ScriptedSession(self._backend, testing.ScriptedSession(self._backend.inner, self._inner._end))

    async def generate(self, gen: Gen) -> AsyncIterator[Piece]:
        self._begin("generate", gen)
        self._is_busy = True
        pieces = self._inner.generate(gen)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await pieces.aclose()
            self._is_busy = False

    async def generate_block(self, items: Sequence[Text | Gen]) -> Sequence[Piece]:
        self._begin("block", tuple(items))
        self._is_busy = True
        pieces = []
        try:
            for item in items:
                if isinstance(item, Text):
                    await self._inner.extend(item)
                else:
                    parts = [piece async for piece in self._inner.generate(item)]
                    pieces.append(Piece("".join(part.text for part in parts), parts[-1].meta))
        finally:
            self._is_busy = False
        return pieces

    async def select(self, select: Select) -> Selection:
        self._begin("select", select)
        self._is_busy = True
        try:
            return await self._inner.select(select)
        finally:
            self._is_busy = False

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "list[ScriptedSession]":
        self._begin("fork", (size, None if position_ids_offset is None else tuple(position_ids_offset)))
        return [ScriptedSession(self._backend, session) for session in await self._inner.fork(size)]

    async def join(self, branches: "Sequence[ScriptedSession]") -> None:
        self._begin("join", tuple(branch._inner.text[branch._fork_len :] for branch in branches))
        await self._inner.join([branch._inner for branch in branches])

    async def close(self) -> None:
        assert not self._is_busy, "closed while a call runs"
        if not self.is_closed:
            self.is_closed = True
            self._backend.changed(-1)

    def _begin(self, kind: str, what: Any) -> None:
        self._check()
        self._backend.calls.append(Call(kind, self._inner.text, what, self._inner.items))

    def _check(self) -> None:
        assert not self.is_closed, "called after close"
        assert not self._is_busy, "called while another call runs"


def numbered() -> ScriptedBackend:
    """Answers 1, 2, 3, ... in the order of the calls."""
    return ScriptedBackend([str(number) for number in range(1, 1000)])
