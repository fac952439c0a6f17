"""A token model without an engine: a real tokenizer, and answers that a test writes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from jsg.constrained.stop_patterns import stop_patterns
from jsg.lang.tokens.model import Hold, Outcome, ScoredChoices, TokenCall, TokenDelta
from jsg.lang.tokens.scoring import ScorePlan
from jsg.lang.tokens.session import TokenSession
from jsg.lang.words.ir import Gen, RoleBegin, RoleEnd, SamplingArgs, Text
from jsg.processing.media_prompt import MediaReader
from jsg.processing.parts import Part
from jsg.processing.tokenizer import Tokenizer
from jsg.speech.answers.answer import Answer, Prompt
from jsg.speech.answers.thoughts import Markers
from jsg.speech.prompts.encode_parts import EncodedPrompt, encode_choices, encode_parts, split_answer
from jsg.speech.prompts.turns import ChatTurns
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams, TokenLogprob

NextLogprobs = Callable[[tuple[int, ...]], Sequence[float]]
"""The log-probability of every token behind some tokens."""


async def said(session: TokenSession, *, markers: Markers | None = None, **args: Any) -> str:
    """The text of a gen, from all of its pieces."""
    pieces = [piece async for piece in session.generate(Gen("x", SamplingArgs(**args), markers=markers))]
    assert pieces[-1].meta is not None
    assert all(piece.meta is None for piece in pieces[:-1])
    return "".join(piece.text for piece in pieces)


async def turn(session: TokenSession, role: Any, *contents: str) -> str:
    text = await session.extend(RoleBegin(role))
    for content in contents:
        text += await session.extend(Text(content))
    return text + await session.extend(RoleEnd(role))


class FakeModel:
    """Says what `answers` holds, one after another: token ids, or a text whose tokens go on where the prompt ends.

    Attributes:
        prompts: Of every call in order, as tokens; `calls` and `holds` the same as they came.
        hold_gate: A hold waits for it.
        hold_error: A hold fails with it.
        num_holds: Holds that are open.
        num_aborted: Calls that were closed before their end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        answers: Sequence[str | Sequence[int]] = (),
        *,
        template: str | None = None,
        next_logprobs: NextLogprobs | None = None,
        media: MediaReader | None = None,
    ):
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.prompts: list[EncodedPrompt] = []
        self.calls: list[TokenCall] = []
        self.holds: list[tuple[Part, ...]] = []
        self.hold_gate = asyncio.Event()
        self.hold_gate.set()
        self.hold_error: Exception | None = None
        self.num_holds = 0
        self.num_aborted = 0
        self.num_waited = 0
        self._template = tokenizer.chat_template if template is None else template
        self._next_logprobs = next_logprobs
        self._media = media

    async def turns(self) -> ChatTurns:
        bos_token, eos_token = self.tokenizer.bos_token, self.tokenizer.eos_token
        placeholders = None if self._media is None else self._media.placeholders
        return ChatTurns(self._template, bos_token=bos_token, eos_token=eos_token, placeholders=placeholders)

    async def generate(self, call: TokenCall) -> AsyncGenerator[TokenDelta]:
        encoded = encode_parts(self.tokenizer, call.prompt, media=self._media)
        self.calls.append(call)
        self.prompts.append(encoded)
        said = self.answers.pop(0)
        ids = self.tokenizer.encode(said, add_special_tokens=False, continues=True) if isinstance(said, str) else said
        sampling = SamplingParams.from_dict(call.sampling)
        request = Request(rid="a", input_ids=encoded.input_ids or (0,), sampling=sampling)
        answer = Answer(request, self.tokenizer, patterns=stop_patterns(sampling))
        try:
            for index, token in enumerate(ids):
                is_last = index == len(ids) - 1
                finish = FinishReason(FinishType.LENGTH) if is_last else None
                delta = answer.push(RequestOutput(rid="a", token_ids=(token,), finish=finish))
                yield TokenDelta(delta.text)
                if delta.finish is not None:
                    break
        except GeneratorExit:
            self.num_aborted += 1
            raise
        kept_ids, tail = split_answer(self.tokenizer, answer)
        meta: dict[str, Any] = answer.result()["meta_info"]
        yield TokenDelta("", Outcome(part_ids=encoded.part_ids, kept_ids=kept_ids, tail=tail, meta=meta))

    async def score(
        self, prompt: tuple[Part, ...], choices: Sequence[str], *, unconditional: bool = False
    ) -> ScoredChoices:
        encoded = encode_choices(self.tokenizer, prompt, choices, media=self._media)
        self.prompts.append(encoded.before)
        plan = ScorePlan(encoded, rid="a", unconditional=unconditional)
        assert self._next_logprobs is not None
        return plan.read(
            [scored_answer(prompt, self.tokenizer, self._next_logprobs) for prompt in plan.prompts], self.tokenizer
        )

    async def hold(self, prompt: tuple[Part, ...]) -> Hold:
        self.holds.append(prompt)
        await self.hold_gate.wait()
        if self.hold_error is not None:
            raise self.hold_error
        self.num_holds += 1

        async def end() -> None:
            self.num_holds -= 1

        async def wait() -> None:
            self.num_waited += 1

        return Hold(encode_parts(self.tokenizer, prompt, media=self._media).part_ids, end, wait)


def scored_answer(prompt: Prompt, tokenizer: Tokenizer, next_logprobs: NextLogprobs) -> Answer:
    """The engine's output for a request that scores its prompt, or the tokens that may follow it."""
    (request,) = prompt.requests(0)
    ids = request.input_ids
    answer = Answer(request, tokenizer)
    start = request.logprob_start_len

    def at(index: int) -> TokenLogprob:
        if not index:
            return TokenLogprob(ids[0], None)
        table = next_logprobs(ids[:index])
        return TokenLogprob(
            ids[index], table[ids[index]], chosen=tuple((i, table[i]) for i in request.token_ids_logprob)
        )

    if not request.sampling.max_new_tokens:
        scored = tuple(map(at, range(start, len(ids)))) if start >= 0 else None
        answer.push(RequestOutput(rid="a", finish=FinishReason(FinishType.LENGTH), prompt_logprobs=scored))
        return answer
    table = next_logprobs(ids)
    best = max(range(len(table)), key=table.__getitem__)
    chosen = tuple((token, table[token]) for token in request.token_ids_logprob)
    logprob = TokenLogprob(best, table[best], chosen=chosen)
    answer.push(RequestOutput(rid="a", token_ids=(best,), finish=FinishReason(FinishType.LENGTH), logprobs=(logprob,)))
    return answer
