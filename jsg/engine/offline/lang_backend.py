"""`jsg.Engine` as the backend of programs: the model in this process, by its tokens."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, final, runtime_checkable

from jsg.errors import RequestError
from jsg.lang.tokens.local_model import HELD, LocalModel
from jsg.lang.tokens.session import TokenSession, open_session
from jsg.processing.answer import Answer, Prompt
from jsg.processing.encode_parts import EncodedChoices, EncodedPrompt, encode_choices, encode_parts, media_parts
from jsg.processing.media_prompt import MediaReader
from jsg.processing.parts import Part, TextPart
from jsg.processing.tokenizer import Tokenizer
from jsg.processing.turns import ChatTurns

_LONG_TEXT = 20_000  # characters that take longer to encode than a call of another thread


@runtime_checkable
class EngineCalls(Protocol):
    """What the backend asks of an engine."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        ...

    @property
    def media(self) -> MediaReader | None:
        """Reads pictures and videos; None for a model that sees nothing."""
        ...

    def answer_async(self, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[list[Answer], int]]:
        """Runs prompts together; gives all answers and the index of the one that moved. Closing it early aborts."""
        ...

    def hold(self, prompt: Prompt, heard: Callable[[], None]) -> Callable[[], None]:
        """Submits a prompt that is to be held; gives what ends it.

        `heard` is called on a thread of the engine's, when the prompt is cached and when the hold ends there.
        """
        ...

    def flush_cache(self) -> bool:
        """Forgets every cached prefix; False while requests run."""
        ...

    def get_server_info(self) -> dict[str, Any]:
        """The model, the sizes and the counters."""
        ...


@final
class EngineHold:
    """A prefix that stays in the cache.

    Attributes:
        part_ids: As in `tokens.model.Outcome`.
    """

    def __init__(
        self, part_ids: tuple[tuple[int, ...], ...], end: Callable[[], None], is_cached: asyncio.Event
    ) -> None:
        self.part_ids = part_ids
        self._end: Callable[[], None] | None = end
        self._is_cached = is_cached

    async def cached(self) -> None:
        """Returns when it is computed, or has ended."""
        await self._is_cached.wait()

    async def release(self) -> None:
        """Ends it. A second time does nothing."""
        end, self._end = self._end, None
        if end is not None:
            end()
            self._is_cached.set()


@final
class EngineModel(LocalModel):
    """A `tokens.model.TokenModel` on an engine in this process."""

    def __init__(self, engine: EngineCalls) -> None:
        super().__init__(engine.tokenizer)
        self._engine = engine
        self._numbers = itertools.count()
        self._turns: ChatTurns | None = None

    async def turns(self) -> ChatTurns:
        """The model's chat template. Raises RequestError where it has none."""
        if self._turns is None:
            media = self._engine.media
            self._turns = ChatTurns.of_tokenizer(self._tokenizer, {} if media is None else media.placeholders)
        return self._turns

    async def hold(self, prompt: tuple[Part, ...]) -> EngineHold:
        """Has a prompt computed and kept cached until it is released; does not wait for it. Raises JsgError."""
        encoded = await self._encode(prompt)
        if not encoded.input_ids:
            raise RequestError("a prompt must have at least one token to be held, but has none; append text", "prompt")
        loop, is_cached = asyncio.get_running_loop(), asyncio.Event()

        def heard() -> None:
            loop.call_soon_threadsafe(is_cached.set)

        end = self._engine.hold(self._prompt(encoded, HELD, hold=True), heard)
        return EngineHold(encoded.part_ids, end, is_cached)

    async def _encode(self, parts: tuple[Part, ...]) -> EncodedPrompt:
        media = self._engine.media
        return await self._beside(lambda: encode_parts(self._tokenizer, parts, media=media), _size(parts))

    async def _encode_choices(self, parts: tuple[Part, ...], choices: Sequence[str]) -> EncodedChoices:
        media = self._engine.media
        size = (1 + len(choices)) * _size(parts) + sum(map(len, choices))
        return await self._beside(lambda: encode_choices(self._tokenizer, parts, choices, media=media), size)

    async def _run(self, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[Sequence[Answer], int, str]]:
        num_shown = [0] * sum(prompt.sampling.n for prompt in prompts)
        async with contextlib.aclosing(self._engine.answer_async(prompts)) as steps:
            async for answers, index in steps:
                text = answers[index].text
                yield answers, index, text[num_shown[index] :]
                num_shown[index] = len(text)

    async def _beside[T](self, work: Callable[[], T], size: int) -> T:
        return await asyncio.to_thread(work) if size > _LONG_TEXT else work()

    def _new_fields(self) -> dict[str, Any]:
        return {"rid": f"program-{next(self._numbers)}"}


@final
class EngineBackend:
    """A `backend.Backend` on an engine in this process."""

    def __init__(self, engine: EngineCalls) -> None:
        self._engine = engine
        self._model = EngineModel(engine)

    def open(self, *, num_api_spec_tokens: int | None = None) -> TokenSession:
        """An empty session. Raises RequestError as `open_session`."""
        return open_session(self._model, num_api_spec_tokens)

    async def flush_cache(self) -> bool:
        """Forgets cached prefixes; False where requests run."""
        return await asyncio.to_thread(self._engine.flush_cache)

    async def server_info(self) -> dict[str, Any]:
        """The model, the sizes and the counters of the engine."""
        return await asyncio.to_thread(self._engine.get_server_info)

    async def close(self) -> None:
        """Does nothing: the engine is closed by who made it."""


def _size(parts: Sequence[Part]) -> int:
    """Characters to encode; a file takes as long as the longest of texts."""
    if media_parts(parts):
        return _LONG_TEXT + 1
    return sum(len(part.text) for part in parts if isinstance(part, TextPart))
