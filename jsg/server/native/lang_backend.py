"""The served model for programs: a `TokenModel` whose calls are counted and limited like other requests."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, final

from jsg.errors import AbortedError, ForbiddenError, JsgError, RequestError
from jsg.lang.tokens.local_model import HELD, LocalModel
from jsg.lang.tokens.model import Hold
from jsg.lang.tokens.scoring import ScoreLimits
from jsg.lang.tokens.session import TokenSession
from jsg.processing.parts import Part
from jsg.server.caller import ApiCall
from jsg.server.front import Front
from jsg.server.generation import MAX_ANSWERS, MAX_PROMPT_TOKENS, MAX_SCORES, Generation, new_rid
from jsg.server.shared.prompt_parts import encode_choices_of, encode_prompt
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.prompts.encode_parts import EncodedChoices, EncodedPrompt
from jsg.speech.prompts.turns import ChatTurns
from jsg.types import FinishType


@final
class Budget:
    """The limit on all calls of one HTTP request: together they may cost as much as one request with their prompts."""

    def __init__(self) -> None:
        """Nothing is spent."""
        self._spent = (0, 0, 0)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raises RequestError where these prompts are too much."""
        self._with(prompts)

    def spend(self, prompts: Sequence[Prompt]) -> None:
        """Counts these prompts. Raises RequestError where they are too much, and counts nothing then."""
        self._spent = self._with(prompts)

    def _with(self, prompts: Sequence[Prompt]) -> tuple[int, int, int]:
        num_tokens, num_held, num_scores = self._spent
        for prompt in prompts:
            if prompt.hold:  # a hint: holds must not use up what answers need
                num_held += len(prompt.input_ids)
            else:
                num_tokens += (len(prompt.input_ids) + prompt.sampling.max_new_tokens) * prompt.sampling.n
            num_scores += prompt.num_scores
        for what, spent, most in (
            ("tokens of prompts and answers", num_tokens, MAX_PROMPT_TOKENS),
            ("tokens of prefixes that are held", num_held, MAX_PROMPT_TOKENS),
            ("log-probabilities", num_scores, MAX_SCORES),
        ):
            if spent > most:
                raise RequestError(
                    f"the calls of a program must have at most {most} {what} in all, but have {spent} so far; ask for "
                    "less, or run it in parts"
                )
        return num_tokens, num_held, num_scores


@final
class FrontModel(LocalModel):
    """The served model, for the calls of one HTTP request."""

    def __init__(
        self,
        front: Front,
        call: ApiCall,
        *,
        namespace: str,
        priority: int = 0,
        rid: str | None = None,
        waits: bool = False,
        is_read: bool = True,
        budget: "Budget | None" = None,
    ) -> None:
        """The model for one request.

        Args:
            front: The server that has the model.
            call: The HTTP request.
            namespace, priority: For all calls, as in `types.Request`.
            rid: The beginning of the names of all calls; None makes one.
            waits: The request was let in as a program. Its calls may enter while the server ends, and wait where the
                caller's key has no room for another answer. Otherwise such calls are refused.
            is_read: Somebody reads the answers as they grow.
            budget: The limit on all calls together; None where there is one call.
        """
        limits = ScoreLimits(prompts=MAX_ANSWERS, tokens=MAX_PROMPT_TOKENS, scores=MAX_SCORES)
        super().__init__(front.generator.tokenizer, limits)
        self._front = front
        self._call = dataclasses.replace(call, is_let_in=True) if waits else call
        self._waits = waits
        self._is_read = is_read
        self._namespace = namespace
        self._priority = priority
        self._rid = rid or new_rid()
        self._budget = budget
        self._num_calls = 0
        self._holds: list[Hold] = []

    def info(self) -> dict[str, Any]:
        """Which model this is."""
        return {"model": self._front.model_name, "max_request_tokens": self._front.generator.info.max_request_tokens}

    async def turns(self) -> ChatTurns:
        """The model's chat template. Raises RequestError where it has none."""
        return self._front.turns

    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        """Begins to compute a prompt, which then stays cached until it is released. Does not wait for it.

        This is a hint: where there are too many holds already, the prompt is not held.

        Raises:
            JsgError: The prompt is wrong, or the budget is spent.
        """
        encoded = await self._encode(prompt)
        generation, is_settled = await self._begin([self._prompt(encoded, HELD, hold=True)]), asyncio.Event()
        holding = asyncio.create_task(_hold(generation, is_settled))

        async def end() -> None:
            holding.cancel()
            await asyncio.wait((holding,))

        hold = Hold(encoded.part_ids, end, is_settled.wait)
        self._holds.append(hold)
        return hold

    async def close(self) -> None:
        """Releases all prompts that are still held."""
        for hold in self._holds:
            await hold.release()

    async def _encode(self, parts: tuple[Part, ...]) -> EncodedPrompt:
        await self._front.generator.share.turn(self._call.caller.tenant)
        return await encode_prompt(self._front, parts, namespace=self._namespace)

    async def _encode_choices(self, parts: tuple[Part, ...], choices: Sequence[str]) -> EncodedChoices:
        await self._front.generator.share.turn(self._call.caller.tenant)
        return await encode_choices_of(self._front, parts, choices, namespace=self._namespace)

    async def _beside[T](self, work: Callable[[], T], size: int) -> T:
        return await self._front.generator.beside(work, size)

    def _new_fields(self) -> dict[str, Any]:
        self._num_calls += 1
        return {"rid": f"{self._rid}-{self._num_calls}", "namespace": self._namespace, "priority": self._priority}

    async def _begin(self, prompts: Sequence[Prompt]) -> Generation:
        if self._budget is not None:
            self._budget.check(prompts)  # before the call is prepared, which takes time on the event loop
        generation = await self._front.generator.begin(self._call, prompts)
        if self._budget is not None:
            self._budget.spend(prompts)  # after it, because a call that `begin` refuses costs nothing
        return generation

    def _room(self, num_answers: int) -> contextlib.AbstractAsyncContextManager[None]:
        """Waits until the caller's key has room for so many answers, if this model's calls may wait."""
        if not self._waits:
            return contextlib.nullcontext()
        return self._front.generator.admission.room(self._call.caller.tenant, num_answers)

    async def _run(self, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[Sequence[Answer], int, str]]:
        """Waits until the caller's key has room. Raises AbortedError unless every answer comes to its end."""
        num_answers = sum(prompt.sampling.n for prompt in prompts)
        async with self._room(num_answers):
            generation = await self._begin(prompts)
        with generation.run(is_read=self._is_read) as deltas:
            async for index, delta in deltas:
                yield generation.answers, index, delta.text
        _check_whole(generation.answers)


@final
class FrontBackend:
    """A `backend.Backend` on the served model, for programs that are sent whole."""

    def __init__(self, model: FrontModel) -> None:
        self._model = model

    def open(self, *, num_api_spec_tokens: int | None = None) -> TokenSession:
        """Opens an empty session. It ignores the hint, because the prompt is cached anyway."""
        return TokenSession(self._model)

    async def flush_cache(self) -> bool:
        """Raises ForbiddenError: a program must not drop the cached prefixes of others."""
        raise ForbiddenError("a program must not empty the server's cache; send POST /flush_cache with the admin key")

    async def server_info(self) -> dict[str, Any]:
        """Which model this is."""
        return self._model.info()

    async def close(self) -> None:
        """Releases all prompts that are still held."""
        await self._model.close()


async def _hold(generation: Generation, is_settled: asyncio.Event) -> None:
    try:
        with generation.hold() as deltas:
            async for _ in deltas:
                is_settled.set()
    except JsgError:
        pass  # the hint is lost; if something is wrong, the continuation of the prompt fails with it
    finally:
        is_settled.set()


def _check_whole(answers: Sequence[Answer]) -> None:
    """Raises AbortedError unless every answer came to its end."""
    if any(answer.finish is None or answer.finish.type is FinishType.ABORT for answer in answers):
        raise AbortedError("the request was aborted before it ended; send it again")
