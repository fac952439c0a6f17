"""`jsg.Engine` as the backend of programs: a token model in this process."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, final

from jsg.errors import RequestError
from jsg.lang.tokens.local_model import HELD, LocalModel
from jsg.lang.tokens.model import Hold
from jsg.lang.tokens.session import TokenSession
from jsg.processing.media_prompt import MediaReader
from jsg.processing.parts import Part, TextPart
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.prompts.encode_parts import EncodedChoices, EncodedPrompt, encode_choices, encode_parts, media_parts
from jsg.speech.prompts.turns import ChatTurns

_LONG_TEXT = 20_000  # characters; encoding them takes longer than a call of another thread


Answering = Callable[[Sequence[Prompt]], AsyncGenerator[tuple[list[Answer], int, str]]]
"""`Engine.answer_async`."""
Holding = Callable[[Prompt, Callable[[], None]], Callable[[], None]]
"""`Engine.hold`."""


@final
class EngineModel(LocalModel):
    """A `tokens.model.TokenModel` on an engine in this process."""

    def __init__(self, tokenizer: Tokenizer, media: MediaReader | None, answer: Answering, hold: Holding) -> None:
        super().__init__(tokenizer)
        self._media = media
        self._answer = answer
        self._hold = hold
        self._numbers = itertools.count()
        self._turns: ChatTurns | None = None

    async def turns(self) -> ChatTurns:
        """The model's chat template. Raises RequestError where it has none."""
        if self._turns is None:
            placeholders = {} if self._media is None else self._media.placeholders
            self._turns = ChatTurns.of_tokenizer(self._tokenizer, placeholders)
        return self._turns

    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        """Computes a prompt and keeps it cached until it is released. Does not wait for it. Raises JsgError."""
        encoded = await self._encode(prompt)
        if not encoded.input_ids:
            raise RequestError("a prompt must have at least one token to be held, but has none; append text", "prompt")
        loop, is_cached = asyncio.get_running_loop(), asyncio.Event()

        def heard() -> None:
            loop.call_soon_threadsafe(is_cached.set)

        stop = self._hold(self._prompt(encoded, HELD, hold=True), heard)

        async def end() -> None:
            stop()
            is_cached.set()

        return Hold(encoded.part_ids, end, is_cached.wait)

    async def _encode(self, parts: tuple[Part, ...]) -> EncodedPrompt:
        return await self._beside(lambda: encode_parts(self._tokenizer, parts, media=self._media), _size(parts))

    async def _encode_choices(self, parts: tuple[Part, ...], choices: Sequence[str]) -> EncodedChoices:
        size = (1 + len(choices)) * _size(parts) + sum(map(len, choices))
        return await self._beside(lambda: encode_choices(self._tokenizer, parts, choices, media=self._media), size)

    async def _run(self, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[Sequence[Answer], int, str]]:
        async with contextlib.aclosing(self._answer(prompts)) as steps:
            async for step in steps:
                yield step

    async def _beside[T](self, work: Callable[[], T], size: int) -> T:
        return await asyncio.to_thread(work) if size > _LONG_TEXT else work()

    def _new_fields(self) -> dict[str, Any]:
        return {"rid": f"program-{next(self._numbers)}"}


@final
class EngineBackend:
    """A `backend.Backend` on an engine in this process."""

    def __init__(
        self, model: EngineModel, flush_cache: Callable[[], bool], server_info: Callable[[], dict[str, Any]]
    ) -> None:
        self._model = model
        self._flush_cache = flush_cache
        self._server_info = server_info

    def open(self, *, num_api_spec_tokens: int | None = None) -> TokenSession:
        """Opens an empty session. It ignores the hint, because the prompt is cached anyway."""
        return TokenSession(self._model)

    async def flush_cache(self) -> bool:
        """Forgets cached prefixes; False while requests run."""
        return await asyncio.to_thread(self._flush_cache)

    async def server_info(self) -> dict[str, Any]:
        """The model, the sizes and the counters of the engine."""
        return await asyncio.to_thread(self._server_info)

    async def close(self) -> None:
        """Does nothing, because whoever made the engine closes it."""


def _size(parts: Sequence[Part]) -> int:
    """Characters to encode. A file counts as a long text."""
    if media_parts(parts):
        return _LONG_TEXT + 1
    return sum(len(part.text) for part in parts if isinstance(part, TextPart))
