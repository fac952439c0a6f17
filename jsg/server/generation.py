"""One request → the text its client sees. Every endpoint generates through here.

A `Prompt` becomes one `Request` per answer; the engine's outputs become `AnswerDelta`s, and an `Answer` adds them up.
"""

import asyncio
import contextlib
import dataclasses
import random
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import final

from jsg.engine.client import EngineClient
from jsg.engine.protocol import ModelInfo
from jsg.errors import JsgError, RequestError
from jsg.processing.output import OutputStream
from jsg.processing.tokenizer import Tokenizer
from jsg.types import FinishReason, FinishType, Request, SamplingParams, TokenLogprob, expand_answers

MAX_ANSWERS = 1024  # of one HTTP request: prompts times n
PROMPT_TAIL_LEN = 8  # tokens that can begin a character which the answer completes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What to continue, and what to report of it.

    Attributes:
        rid: Name of its request; answers of n > 1 get a number behind it.
        input_ids: The tokens.
        is_continued: The answer goes on in the prompt's text, so that a leading space is kept; false after a chat
            template, where the answer is a text of its own.
        return_logprob, logprob_start_len, top_logprobs_num, token_ids_logprob: As in `Request`.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams
    is_continued: bool = True
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AnswerDelta:
    """What one step added to one answer.

    Attributes:
        text: New text.
        token_ids: New tokens, up to the one that completed a stop string.
        logprobs: One per new token when asked for.
        finish: Set in the last delta.
        prompt_logprobs, cached_tokens, queue_s: As in `RequestOutput`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int = 0
    queue_s: float = 0.0


@final
class Answer:
    """One answer as far as it has come. Times are in seconds since the request was made."""

    def __init__(self, prompt: Prompt, request: Request) -> None:
        self.prompt = prompt
        self.request = request
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.finish: FinishReason | None = None
        self.cached_tokens = 0
        self.queue_s = 0.0
        self.first_token_s: float | None = None
        self.elapsed_s = 0.0
        self._started = time.monotonic()

    def add(self, delta: AnswerDelta) -> None:
        """Takes the next delta."""
        self.elapsed_s = time.monotonic() - self._started
        if self.first_token_s is None and delta.token_ids:
            self.first_token_s = self.elapsed_s
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.queue_s = max(self.queue_s, delta.queue_s)
        self.text += delta.text
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish = delta.finish


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
        return [Answer(prompt, request) for prompt in prompts for request in self._requests(prompt)]

    def _requests(self, prompt: Prompt) -> list[Request]:
        samplings = expand_answers(prompt.sampling, self._seeds.getrandbits(63))
        return [
            Request(
                rid=prompt.rid if len(samplings) == 1 else f"{prompt.rid}_{index}",
                input_ids=prompt.input_ids,
                sampling=sampling,
                return_logprob=prompt.return_logprob,
                logprob_start_len=prompt.logprob_start_len,
                top_logprobs_num=prompt.top_logprobs_num,
                token_ids_logprob=prompt.token_ids_logprob,
            )
            for index, sampling in enumerate(samplings)
        ]

    async def run(self, answers: Sequence[Answer]) -> AsyncGenerator[tuple[int, AnswerDelta]]:
        """Generates all answers at once; yields (index of the answer, delta), the delta already added to its answer.

        Closing it early, or the failure of one answer, aborts them all. Raises what `EngineClient.generate` raises,
        and JsgError when the engine failed an answer.
        """
        async with contextlib.aclosing(_merge([self._deltas(answer) for answer in answers])) as deltas:
            async for index, delta in deltas:
                answers[index].add(delta)
                yield index, delta

    async def complete(self, answers: Sequence[Answer]) -> None:
        """Generates all answers to their ends. Raises as `run`."""
        async with contextlib.aclosing(self.run(answers)) as deltas:
            async for _ in deltas:
                pass

    async def _deltas(self, answer: Answer) -> AsyncGenerator[AnswerDelta]:
        request = answer.request
        tail_ids = request.input_ids[-PROMPT_TAIL_LEN:] if answer.prompt.is_continued else ()
        stream = OutputStream(self.tokenizer, request.sampling, prompt_tail_ids=tail_ids)
        async with contextlib.aclosing(self._client.generate(request)) as outputs:
            async for output in outputs:
                delta = stream.push(output.token_ids, output.finish)
                if delta.finish is not None and delta.finish.type is FinishType.ERROR:
                    raise JsgError(delta.finish.message or "the engine failed this request")
                yield AnswerDelta(
                    text=delta.text,
                    token_ids=delta.token_ids,
                    logprobs=output.logprobs[: len(delta.token_ids)],
                    finish=delta.finish,
                    prompt_logprobs=output.prompt_logprobs,
                    cached_tokens=output.cached_tokens,
                    queue_s=output.queue_s,
                )
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
