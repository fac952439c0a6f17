"""`jsg.Engine` as the backend of programs: the model in this process, by its tokens."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Protocol, final, runtime_checkable

from jsg.errors import RequestError
from jsg.lang.tokens.model import Outcome, ScoredChoices, TokenCall, TokenDelta
from jsg.lang.tokens.scoring import ScorePlan
from jsg.lang.tokens.session import TokenSession
from jsg.processing.answer import Answer, Prompt
from jsg.processing.encode_parts import EncodedPrompt, encode_choices, encode_parts, media_parts, split_answer
from jsg.processing.media_prompt import MediaReader
from jsg.processing.parts import Part, TextPart
from jsg.processing.tokenizer import Tokenizer
from jsg.processing.turns import ChatTurns
from jsg.types import SamplingParams

_LONG_TEXT = 20_000  # characters that take longer to encode than a call of another thread
_HELD = SamplingParams(max_new_tokens=0)


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
class EngineModel:
    """A `tokens.model.TokenModel` on an engine in this process."""

    def __init__(self, engine: EngineCalls) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._turns: ChatTurns | None = None

    async def turns(self) -> ChatTurns:
        """The model's chat template. Raises RequestError where it has none."""
        if self._turns is None:
            media = self._engine.media
            self._turns = ChatTurns.of_tokenizer(self._engine.tokenizer, {} if media is None else media.placeholders)
        return self._turns

    async def generate(self, call: TokenCall) -> AsyncGenerator[TokenDelta]:
        """Continues a prompt. Closing it early aborts. Raises JsgError."""
        tokenizer = self._engine.tokenizer
        reports = dict(call.reports)
        texts = tokenizer if reports.pop("return_text_in_logprobs", False) else None
        encoded = await self._encode(call.prompt)
        prompt = self._prompt(encoded, SamplingParams.from_dict(call.sampling), **reports)
        answers: list[Answer] = []
        num_shown = 0
        stream = self._engine.answer_async([prompt])
        try:
            async for answers, index in stream:
                if index == 0 and len(answers[0].text) > num_shown:
                    yield TokenDelta(answers[0].text[num_shown:])
                    num_shown = len(answers[0].text)
        finally:
            await stream.aclose()
        kept_ids, tail = split_answer(tokenizer, answers[0])
        result = answers[0].result(texts)
        yield TokenDelta(
            "",
            Outcome(
                part_ids=encoded.part_ids,
                kept_ids=kept_ids,
                tail=tail,
                meta=result["meta_info"] | {"output_ids": result["output_ids"]},
                others=tuple(answer.text for answer in answers[1:]),
            ),
        )

    async def score(
        self, prompt: tuple[Part, ...], choices: Sequence[str], *, unconditional: bool = False
    ) -> ScoredChoices:
        """How likely each choice comes next, in one engine call. Raises JsgError."""
        tokenizer, media = self._engine.tokenizer, self._engine.media
        size = (1 + len(choices)) * _size(prompt) + sum(map(len, choices))
        encoded = await _aside(size, lambda: encode_choices(tokenizer, prompt, choices, media=media))
        plan = ScorePlan(encoded, rid=self._name("select"), unconditional=unconditional)
        answers: list[Answer] = []
        if plan.prompts:
            async for moved in self._engine.answer_async(plan.prompts):
                answers = moved[0]
        return plan.read(answers, tokenizer)

    async def hold(self, prompt: tuple[Part, ...]) -> EngineHold:
        """Has a prompt computed and kept cached until it is released; does not wait for it. Raises JsgError."""
        encoded = await self._encode(prompt)
        if not encoded.input_ids:
            raise RequestError("a prompt must have at least one token to be held, but has none; append text", "prompt")
        loop, is_cached = asyncio.get_running_loop(), asyncio.Event()

        def heard() -> None:
            loop.call_soon_threadsafe(is_cached.set)

        end = self._engine.hold(self._prompt(encoded, _HELD, hold=True), heard)
        return EngineHold(encoded.part_ids, end, is_cached)

    async def _encode(self, parts: tuple[Part, ...]) -> EncodedPrompt:
        tokenizer, media = self._engine.tokenizer, self._engine.media
        return await _aside(_size(parts), lambda: encode_parts(tokenizer, parts, media=media))

    def _prompt(self, encoded: EncodedPrompt, sampling: SamplingParams, **fields: Any) -> Prompt:
        return Prompt(
            rid=self._name("program"),
            **encoded.fields,
            sampling=sampling,
            **fields,
        )

    def _name(self, kind: str) -> str:
        return f"{kind}-{next(self._numbers)}"


@final
class EngineBackend:
    """A `backend.Backend` on an engine in this process."""

    def __init__(self, engine: EngineCalls) -> None:
        self._engine = engine
        self._model = EngineModel(engine)

    def open(self, *, num_api_spec_tokens: int | None = None) -> TokenSession:
        """An empty session.

        Raises:
            RequestError: `num_api_spec_tokens` is given: it saves calls of a remote API, and there is none.
        """
        if num_api_spec_tokens is not None:
            raise RequestError(
                f"num_api_spec_tokens must be left out with an engine, whose cache makes it useless, but got "
                f"{num_api_spec_tokens}; leave it out",
                param="num_api_spec_tokens",
            )
        return TokenSession(self._model)

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


async def _aside[T](size: int, encode: Callable[[], T]) -> T:
    """Encodes; in a thread where that takes long."""
    return await asyncio.to_thread(encode) if size > _LONG_TEXT else encode()
