"""What the `TokenModel`s of `jsg.Engine` and of a server have in common: they encode prompts in their process."""

import abc
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from jsg.errors import RequestError
from jsg.lang.tokens.model import Hold, Outcome, ScoredChoices, TokenCall, TokenDelta
from jsg.lang.tokens.scoring import ScoreLimits, ScorePlan
from jsg.lang.words.backend import with_answers
from jsg.processing.parts import Part
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.prompts.encode_parts import EncodedChoices, EncodedPrompt, split_answer
from jsg.speech.prompts.turns import ChatTurns
from jsg.types import SamplingParams

HELD = SamplingParams(max_new_tokens=0)
"""The sampling parameters of a prompt that is only held."""


def _meta(answer: Answer, texts: Tokenizer | None) -> dict[str, Any]:
    result = answer.result(texts)
    return result["meta_info"] | {"output_ids": result["output_ids"]}


class LocalModel(abc.ABC):
    """Encodes, runs and reads prompts, with the means of a subclass."""

    def __init__(self, tokenizer: Tokenizer, limits: ScoreLimits | None = None) -> None:
        """Makes a model with this tokenizer, which refuses choices beyond `limits`."""
        self._tokenizer = tokenizer
        self._limits = limits

    async def generate(self, call: TokenCall) -> AsyncGenerator[TokenDelta]:
        """Does what `TokenModel.generate` says."""
        reports = dict(call.reports)
        texts = self._tokenizer if reports.pop("return_text_in_logprobs", False) else None
        encoded = await self._encode(call.prompt)
        if not encoded.input_ids:  # before the sampling parameters, whose errors the remedy of this one does not touch
            raise RequestError(
                "the prompt is empty, and this model puts no token before a text; append text before the first gen",
                param="prompt",
            )
        prompt = self._prompt(encoded, SamplingParams.from_dict(call.sampling), **reports)
        answers: Sequence[Answer] = []
        async with aclosing(self._run([prompt])) as steps:
            async for grown, index, text in steps:
                answers = grown
                if index == 0 and text:
                    yield TokenDelta(text)
        kept_ids, tail = split_answer(self._tokenizer, answers[0])
        metas = [_meta(answer, texts) for answer in answers]
        outcome = Outcome(
            part_ids=encoded.part_ids,
            kept_ids=kept_ids,
            tail=tail,
            meta=with_answers(metas),
            others=tuple(answer.text for answer in answers[1:]),
        )
        yield TokenDelta("", outcome)

    async def score(
        self, prompt: tuple[Part, ...], choices: Sequence[str], *, unconditional: bool = False
    ) -> ScoredChoices:
        """Does what `TokenModel.score` says."""
        encoded = await self._encode_choices(prompt, choices)
        size = sum(map(len, encoded.choice_ids)) + len(encoded.prefix_ids) * len(choices)
        fields = self._new_fields()
        plan = await self._beside(
            lambda: ScorePlan(encoded, unconditional=unconditional, limits=self._limits, **fields), size
        )
        answers: Sequence[Answer] = []
        if plan.prompts:  # a choice without a token has nothing to score
            async with aclosing(self._run(plan.prompts)) as steps:
                async for grown, _, _ in steps:
                    answers = grown
        return await self._beside(lambda: plan.read(answers, self._tokenizer), size)

    def _prompt(self, encoded: EncodedPrompt, sampling: SamplingParams, **fields: Any) -> Prompt:
        return Prompt(**self._new_fields(), **encoded.fields, sampling=sampling, **fields)

    @abc.abstractmethod
    async def turns(self) -> ChatTurns:
        """Does what `TokenModel.turns` says."""

    @abc.abstractmethod
    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        """Does what `TokenModel.hold` says."""

    @abc.abstractmethod
    async def _encode(self, parts: tuple[Part, ...]) -> EncodedPrompt:
        """Gives the tokens of a prompt. Raises JsgError."""

    @abc.abstractmethod
    async def _encode_choices(self, parts: tuple[Part, ...], choices: Sequence[str]) -> EncodedChoices:
        """Gives the tokens of choices after a prompt. Raises JsgError."""

    @abc.abstractmethod
    def _run(self, prompts: Sequence[Prompt]) -> AsyncGenerator[tuple[Sequence[Answer], int, str]]:
        """Runs prompts together; gives all answers, the index of the one that grew, and its new text."""

    @abc.abstractmethod
    async def _beside[T](self, work: Callable[[], T], size: int) -> T:
        """Does work on `size` characters or tokens, in a thread where it would block the event loop for long."""

    @abc.abstractmethod
    def _new_fields(self) -> dict[str, Any]:
        """Gives the name of a new request, and the further fields that all prompts of this model share."""
