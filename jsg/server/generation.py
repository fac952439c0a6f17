"""Prompts in, answers out: every endpoint generates through here."""

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import final

from jsg.engine.client import EngineClient
from jsg.engine.protocol import ModelInfo
from jsg.errors import JsgError, RequestError
from jsg.processing.answer import Answer, AnswerDelta, Prompt
from jsg.processing.tokenizer import Tokenizer
from jsg.types import FinishType

MAX_ANSWERS = 1024  # of one HTTP request: prompts times n


@final
class Generator:
    """Prompts in, answers out, on one event loop."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, *, random_seed: int) -> None:
        self._client = client
        self.tokenizer = tokenizer
        self._seeds = random.Random(random_seed)

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""
        return self._client.info

    async def encode(self, prompts: Sequence[str | list[int]]) -> list[tuple[int, ...]]:
        """The tokens of each prompt; texts are encoded beside the event loop. Raises RequestError."""

        def encode_all() -> list[tuple[int, ...]]:
            return [tuple(self.tokenizer.encode(p) if isinstance(p, str) else p) for p in prompts]

        return await asyncio.to_thread(encode_all)

    def answers(self, prompts: Sequence[Prompt]) -> list[Answer]:
        """The empty answers, `n` for each prompt in turn. Raises RequestError for more than `MAX_ANSWERS`."""
        num_answers = sum(prompt.sampling.n for prompt in prompts)
        if num_answers > MAX_ANSWERS:
            raise RequestError(
                f"prompts times n must be at most {MAX_ANSWERS} answers, but got {num_answers}; send several requests"
            )
        return [
            Answer(request, self.tokenizer, is_continued=prompt.is_continued)
            for prompt in prompts
            for request in prompt.requests(self._seeds.getrandbits(63))
        ]

    async def run(self, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, AnswerDelta]]:
        """Generates all answers at once; yields (index of the answer, what was added to it).

        Closing it early, or the failure of one answer, aborts them all. Raises what `EngineClient.generate` raises,
        and JsgError when the engine failed an answer.
        """
        async with contextlib.aclosing(_merge([self._deltas(answer) for answer in answers])) as deltas:
            async for index, delta in deltas:
                yield index, delta

    async def complete(self, answers: Sequence[Answer]) -> None:
        """Generates all answers to their ends. Raises as `run`."""
        async with contextlib.aclosing(self.run(answers)) as deltas:
            async for _ in deltas:
                pass

    async def _deltas(self, answer: Answer) -> AsyncGenerator[AnswerDelta]:
        async with contextlib.aclosing(self._client.generate(answer.request)) as outputs:
            async for output in outputs:
                delta = answer.push(output)
                if delta.finish is not None and delta.finish.type is FinishType.ERROR:
                    raise JsgError(delta.finish.message or "the engine failed this request")
                yield delta
                if delta.finish is not None:
                    return  # at a stop string the engine does not know yet: closing `outputs` aborts the request


def new_rid() -> str:
    """A name for a request whose client gave none."""
    return uuid.uuid4().hex


async def _merge[T](sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Runs all sources at once and yields (index, item) as items come. The first failure closes them all."""
    arrived: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue()

    async def drain(index: int, source: AsyncGenerator[T]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for item in source:
                    arrived.put_nowait((index, item))
        except Exception as error:  # not swallowed: it is raised where the items are read
            arrived.put_nowait(error)
        else:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(drain(index, source)) for index, source in enumerate(sources)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
