"""`/v1/completions`."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar, final

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from jsg.errors import RequestError
from jsg.processing.answer import PROMPT_TAIL_LEN, Answer, Prompt
from jsg.processing.detokenizer import IncrementalDetokenizer
from jsg.processing.tokenizer import Tokenizer
from jsg.server.body import Prompts, is_prompt_list
from jsg.server.event_stream import Event, respond_with_events, until_disconnect
from jsg.server.failures import json_response
from jsg.server.front import Front, ReadyFront
from jsg.server.generation import new_rid
from jsg.server.openai_common import NOT_YET_ANYWHERE, OpenAIBody, finish_reason, now, token_text, usage
from jsg.types import MAX_TOP_LOGPROBS, TokenLogprob

DEFAULT_MAX_TOKENS = 16  # OpenAI's

router = APIRouter()


class CompletionBody(OpenAIBody):
    """What `/v1/completions` takes: one prompt or a list, as text or as token ids."""

    NOT_YET: ClassVar[frozenset[str]] = NOT_YET_ANYWHERE | {"suffix", "best_of"}

    prompt: Prompts
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    echo: bool | None = None


@final
class _Choice:
    """Shows one answer as a choice, whole or in pieces."""

    def __init__(self, index: int, answer: Answer, tokenizer: Tokenizer, echoed: str) -> None:
        self._index = index
        self._answer = answer
        self._tokenizer = tokenizer
        self._unsent = echoed
        self._offset = 0
        self._is_first = True
        tail_ids = () if echoed else answer.request.input_ids[-PROMPT_TAIL_LEN:]
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=answer.request.sampling.skip_special_tokens, prompt_tail_ids=tail_ids
        )

    def show(self, text: str, scored: Sequence[TokenLogprob], finish: str | None) -> dict[str, Any]:
        """The next piece; the first has the echoed prompt in front."""
        text, self._unsent = self._unsent + text, ""
        if self._is_first:
            scored = [*self._answer.prompt_logprobs, *scored]
            self._is_first = False
        logprobs = self._logprobs(scored) if self._answer.request.return_logprob else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, scored: Sequence[TokenLogprob]) -> dict[str, Any]:
        shown: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in scored:
            text = token_text(self._tokenizer, token.token_id)
            shown["tokens"].append(text)
            shown["token_logprobs"].append(token.logprob)
            shown["top_logprobs"].append(None if token.logprob is None else self._top(token, text))
            shown["text_offset"].append(self._offset)
            self._offset += len(self._detokenizer.push((token.token_id,)))
        return shown

    def _top(self, token: TokenLogprob, text: str) -> dict[str, float | None]:
        """The most likely tokens and the one that was taken; of several with one text the most likely."""
        top: dict[str, float | None] = {}
        for token_id, logprob in token.top:
            top.setdefault(token_text(self._tokenizer, token_id), logprob)
        top.setdefault(text, token.logprob)
        return top


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, front: ReadyFront) -> Response:
    """Continues one prompt or several; each `n` times with `n`, as events with `stream`."""
    front.check_model(body.model)
    rid = f"cmpl-{new_rid()}"
    prompts = await _prompts(body, front, rid)
    answers = front.generator.answers(prompts)
    choices = _choices(body, answers, front.generator.tokenizer)
    head = {"id": rid, "object": "text_completion", "created": now(), "model": front.model_name}
    if body.stream:
        return await respond_with_events(request, _events(body, front, answers, choices, head))
    await until_disconnect(request, front.generator.complete(answers))
    shown = [
        choice.show(answer.text, answer.logprobs, finish_reason(answer))
        for choice, answer in zip(choices, answers, strict=True)
    ]
    return json_response({**head, "choices": shown, "usage": usage(answers, body.num_answers)})


async def _prompts(body: CompletionBody, front: Front, rid: str) -> list[Prompt]:
    given: Any = body.prompt if is_prompt_list(body.prompt) else [body.prompt]
    if not given:
        raise RequestError("prompt must have at least one prompt, but it is an empty list", param="prompt")
    sampling = body.to_sampling(DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    return [
        Prompt(
            rid=f"{rid}_{index}",
            input_ids=input_ids,
            sampling=sampling,
            return_logprob=body.logprobs is not None,
            logprob_start_len=0 if body.echo and body.logprobs is not None else -1,
            top_logprobs_num=body.logprobs or 0,
        )
        for index, input_ids in enumerate(await front.generator.encode(given))
    ]


def _choices(body: CompletionBody, answers: Sequence[Answer], tokenizer: Tokenizer) -> list[_Choice]:
    def echoed(answer: Answer) -> str:
        return tokenizer.decode(answer.request.input_ids) if body.echo else ""

    return [_Choice(index, answer, tokenizer, echoed(answer)) for index, answer in enumerate(answers)]


async def _events(
    body: CompletionBody,
    front: Front,
    answers: Sequence[Answer],
    choices: Sequence[_Choice],
    head: dict[str, Any],
) -> AsyncGenerator[Event]:
    head = head | ({"usage": None} if body.wants_usage_event else {})
    async for index, delta in front.generator.run(answers):
        choice = choices[index].show(delta.text, delta.logprobs, finish_reason(answers[index]))
        if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
            yield {**head, "choices": [choice]}
    if body.wants_usage_event:
        yield {**head, "choices": [], "usage": usage(answers, body.num_answers)}
