"""Prompts in, answers out: every endpoint generates through here."""

import asyncio
import contextlib
import random
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import final

from jsg.engine.client import EngineClient
from jsg.engine.protocol import ModelInfo
from jsg.errors import JsgError, RequestError, check_length
from jsg.processing.answer import Answer, AnswerDelta, Prompt
from jsg.processing.tokenizer import Tokenizer
from jsg.types import FinishType

MAX_ANSWERS = 1024  # of one HTTP request: prompts times n
MAX_SCORES = 2**19  # log-probabilities of one HTTP request; making JSON of so many takes the front about a second


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
        """The empty answers, `n` for each prompt in turn.

        Everything that `n` multiplies is checked before it is multiplied.

        Raises:
            RequestError: More than `MAX_ANSWERS` or `MAX_SCORES`, or a prompt that is too long with its new tokens.
        """
        for prompt in prompts:
            check_length(len(prompt.input_ids), prompt.sampling.max_new_tokens, self.info.max_request_tokens)
        num_answers = sum(prompt.sampling.n for prompt in prompts)
        if num_answers > MAX_ANSWERS:
            raise RequestError(
                f"prompts times n must be at most {MAX_ANSWERS} answers, but got {num_answers}; send several requests"
            )
        num_scores = sum(prompt.num_scores for prompt in prompts)
        if num_scores > MAX_SCORES:
            raise RequestError(
                f"return_logprob may report at most {MAX_SCORES} log-probabilities (scored positions times "
                f"alternatives times answers), but this request asks for up to {num_scores}; ask for fewer "
                "alternatives or new tokens, or send several requests",
                param="return_logprob",
            )
        return [
            Answer(request, self.tokenizer, is_continued=prompt.is_continued)
            for prompt in prompts
            for request in prompt.requests(self._seeds.getrandbits(63))
        ]

    async def run(self, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, AnswerDelta]]:
        """Generates all answers at once; yields (index of the answer, what came since it was last yielded).

        A reader that is slower than the engine gets larger deltas, not more of them: what is yielded brings its answer
        up to date. Closing it early, or the failure of one answer, aborts them all. Raises what
        `EngineClient.generate` raises, and JsgError when the engine failed an answer.
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


async def _merge(sources: Sequence[AsyncGenerator[AnswerDelta]]) -> AsyncGenerator[tuple[int, AnswerDelta]]:
    """Runs all sources, each up to its finish, at once; yields (index, all that waits of that source) as they come.

    The first failure closes them all.
    """
    waiting: list[list[AnswerDelta]] = [[] for _ in sources]
    arrived: asyncio.Queue[int | Exception] = asyncio.Queue()  # the sources of which something waits, each once

    async def drain(index: int, source: AsyncGenerator[AnswerDelta]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for delta in source:
                    if not waiting[index]:
                        arrived.put_nowait(index)
                    waiting[index].append(delta)
        except Exception as error:  # not swallowed: it is raised where the deltas are read
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(drain(index, source)) for index, source in enumerate(sources)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            deltas, waiting[item] = waiting[item], []
            delta = AnswerDelta.join(deltas)
            num_open -= delta.finish is not None
            yield item, delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
