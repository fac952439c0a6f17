"""A backend whose answers a test writes: it keeps prompts as text, records every call, and fails or waits when told.

A turn is written `[user]...[/user]`, a picture `<image 5>` (its bytes), a video `<video 5/8>` (bytes/frames).
"""

import asyncio
import concurrent.futures
import dataclasses
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from jsg.lang.backend import Piece, PromptItem, Selection
from jsg.lang.ir import Gen, Image, RoleBegin, RoleEnd, Select, Text, Video
from jsg.processing.parts import file_size

Spoken = str | Sequence[str]
"""An answer at once, or piece by piece."""
Answer = Callable[[str, Gen], Spoken | Awaitable[Spoken]]
"""What the model says behind a prompt; raises to fail."""
Choose = Callable[[str, Select], str | Awaitable[str]]


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


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a session's method.

    Attributes:
        kind: "generate", "select", "block", "fork", "join".
        prompt: The text before it.
        what: The `Gen`, the `Select`, the items of a block, the size of a fork, the branches' texts.
        items: Everything that the prompt holds, in order; what the model wrote is `Text`.
    """

    kind: str
    prompt: str
    what: Any
    items: tuple[PromptItem, ...]


class ScriptedBackend:
    """Answers by `answer(prompt, gen)`, chooses by `choose(prompt, select)` (default: the first choice).

    Attributes:
        calls: Every call, in the order in which they began.
        aborted: The gens whose continuation was closed or cancelled before its end.
        num_open: Sessions that are open now.
        opened_with: `num_api_spec_tokens` of each session that was opened.
    """

    def __init__(
        self,
        answer: Answer | str = "answer",
        choose: Choose | None = None,
        *,
        wants_blocks: bool = False,
    ):
        self.answer: Answer = answer if callable(answer) else lambda _prompt, _gen: answer
        self.choose: Choose = choose or (lambda _prompt, select: select.choices[0])
        self.wants_blocks = wants_blocks
        self.calls: list[Call] = []
        self.aborted: list[Gen] = []
        self.num_open = 0
        self.max_open = 0
        self.opened_with: list[int | None] = []
        self.num_flushes = 0
        self._changed = threading.Condition()
        self.is_closed = False

    def open(self, *, num_api_spec_tokens: int | None = None) -> "ScriptedSession":
        self.opened_with.append(num_api_spec_tokens)
        return ScriptedSession(self, ())

    async def flush_cache(self) -> bool:
        self.num_flushes += 1
        return True

    async def server_info(self) -> dict[str, Any]:
        return {"model": "scripted", "num_open": self.num_open}

    async def close(self) -> None:
        self.is_closed = True

    def wait_closed(self, timeout: float = 30.0) -> None:
        """Blocks until no session is open: they close behind what was read."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_open == 0, timeout):
                raise TimeoutError(f"{self.num_open} sessions stay open")

    def prompts(self, kind: str = "generate") -> list[str]:
        """The prompts of the calls of a kind."""
        return [call.prompt for call in self.calls if call.kind == kind]


class ScriptedSession:
    def __init__(self, backend: ScriptedBackend, items: tuple[PromptItem, ...]):
        self._backend = backend
        self.items = items
        self._fork_len = len(items)
        self.is_closed = False
        self._is_busy = False
        backend.num_open += 1
        backend.max_open = max(backend.max_open, backend.num_open)

    @property
    def text(self) -> str:
        return "".join(written(item) for item in self.items)

    @property
    def wants_blocks(self) -> bool:
        return self._backend.wants_blocks

    async def extend(self, item: PromptItem) -> str:
        self._check()
        self.items += (item,)
        return written(item)

    async def generate(self, gen: Gen) -> AsyncIterator[Piece]:
        self._check()
        prompt = self._record("generate", gen)
        self._is_busy = True
        is_done = False
        try:
            pieces = await self._answer(prompt, gen)
            others = tuple([str(i + 2) + "".join(pieces) for i in range((gen.args.n or 1) - 1)])
            for piece in pieces[:-1]:
                yield Piece(piece)
                await asyncio.sleep(0)
            self.items += (Text("".join(pieces)),)
            is_done = True
            yield Piece(pieces[-1], meta(prompt, pieces), others)
        except (GeneratorExit, asyncio.CancelledError):
            if not is_done:
                self._backend.aborted.append(gen)
            raise
        finally:
            self._is_busy = False

    async def generate_block(self, items: Sequence[Text | Gen]) -> Sequence[Piece]:
        self._check()
        self._record("block", tuple(items))
        self._is_busy = True
        pieces = []
        try:
            for item in items:
                match item:
                    case Text():
                        self.items += (item,)
                    case Gen():
                        prompt = self.text
                        answer = await self._answer(prompt, item)
                        self.items += (Text("".join(answer)),)
                        pieces.append(Piece("".join(answer), meta(prompt, answer)))
        finally:
            self._is_busy = False
        return pieces

    async def select(self, select: Select) -> Selection:
        self._check()
        prompt = self._record("select", select)
        self._is_busy = True
        try:
            chosen = self._backend.choose(prompt, select)
            choice = await chosen if inspect.isawaitable(chosen) else chosen
        finally:
            self._is_busy = False
        self.items += (Text(choice),)
        probabilities = tuple(1.0 if one == choice else 0.0 for one in select.choices)
        return Selection(choice, probabilities, meta(prompt, (choice,)))

    async def fork(self, size: int, position_ids_offset: Sequence[int] | None = None) -> "list[ScriptedSession]":
        self._check()
        self._record("fork", (size, None if position_ids_offset is None else tuple(position_ids_offset)))
        return [ScriptedSession(self._backend, self.items) for _ in range(size)]

    async def join(self, branches: "Sequence[ScriptedSession]") -> None:
        self._check()
        tails = [branch.items[branch._fork_len :] for branch in branches]
        self._record("join", tuple("".join(map(written, tail)) for tail in tails))
        for tail in tails:
            self.items += tail

    async def close(self) -> None:
        assert not self._is_busy, "closed while a call runs"
        if not self.is_closed:
            self.is_closed = True
            with self._backend._changed:
                self._backend.num_open -= 1
                self._backend._changed.notify_all()

    async def _answer(self, prompt: str, gen: Gen) -> Sequence[str]:
        spoken = self._backend.answer(prompt, gen)
        answer = await spoken if inspect.isawaitable(spoken) else spoken
        return ([answer] if isinstance(answer, str) else list(answer)) or [""]

    def _record(self, kind: str, what: Any) -> str:
        prompt = self.text
        self._backend.calls.append(Call(kind, prompt, what, self.items))
        return prompt

    def _check(self) -> None:
        assert not self.is_closed, "called after close"
        assert not self._is_busy, "called while another call runs"


def written(item: PromptItem) -> str:
    """How a scripted prompt shows an item."""
    match item:
        case Text(text):
            return text
        case RoleBegin(role):
            return f"[{role}]"
        case RoleEnd(role):
            return f"[/{role}]"
        case Image(data):
            return f"<image {len(data)}>"
        case Video(data, num_frames):
            return f"<video {file_size(data)}/{num_frames}>"


def meta(prompt: str, pieces: Sequence[str]) -> dict[str, Any]:
    """Counts words as tokens of a prompt and pieces as tokens of an answer."""
    return {
        "prompt_tokens": len(prompt.split()),
        "completion_tokens": len(pieces),
        "cached_tokens": 0,
        "finish_reason": {"type": "stop"},
    }


def numbered() -> ScriptedBackend:
    """Answers 1, 2, 3, ... in the order of the calls."""
    count = iter(range(1, 10**6))
    return ScriptedBackend(lambda prompt, gen: str(next(count)))
