"""What the answers of chat completions and completions share: whole or as events, usage, names of tokens."""

import functools
import hashlib
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from typing import Any, Protocol, final

from fastapi import Request
from starlette.responses import Response

import jsg
from jsg.errors import RequestError
from jsg.processing.tokenizer import Tokenizer
from jsg.server.front import Front
from jsg.server.generation import Generation
from jsg.server.http.event_stream import EventForm, Events, Write, respond_with_events, until_disconnect, writer_of
from jsg.server.http.json_pieces import item_pieces, json_pieces, list_pieces
from jsg.server.http.long_response import respond_in_pieces
from jsg.server.openai.body import OpenAIBody
from jsg.server.shared.answers import token_text
from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt
from jsg.types import TokenLogprob

LEAST_LOGPROB = -9999.0  # OpenAI shows it for a token that is almost impossible; JSON has no infinity


class Choice(Protocol):
    """Shows one answer as an entry of `choices`."""

    @property
    def answer(self) -> Answer:
        """The answer that it shows."""
        ...

    def whole(self) -> dict[str, Any]:
        """The finished answer, in the form of `json_pieces`."""
        ...

    def pieces(self, delta: AnswerDelta) -> list[dict[str, Any]]:
        """What a delta adds, one item for each event. Takes every delta once and in order."""
        ...

    def text_piece(self, text: str) -> dict[str, Any]:
        """What a delta adds that has text and nothing else, after the first delta."""
        ...


async def respond(
    request: Request,
    front: Front,
    body: OpenAIBody,
    generation: Generation,
    choices: Sequence[Choice],
    head: dict[str, Any],
    *,
    kind: str,
    event_kind: str,
) -> Response:
    """Generates the answers and responds, whole or with events, as the body asks.

    Args:
        request: The HTTP request.
        front: Has threads for long answers.
        body: Its body.
        generation: Not yet run.
        choices: One for each of its answers.
        head: What comes before the choices, the `object` left out.
        kind: The `object` of a whole response.
        event_kind: The `object` of an event.
    """
    turn = functools.partial(front.generator.share.turn, generation.call.caller.tenant)
    if body.stream:
        write = writer_of(request)
        events = _events(body, generation, choices, {**head, "object": event_kind}, write)
        return respond_with_events(request, events, turn=turn)
    await until_disconnect(request, generation.complete())
    num_chars = sum(len(answer.text) for answer in generation.answers)
    shown = await front.generator.beside(lambda: [choice.whole() for choice in choices], num_chars)
    counted = usage(generation.answers, body.num_answers)
    whole = {**head, "object": kind, "choices": item_pieces(shown), "usage": counted}
    return await respond_in_pieces(json_pieces(whole), turn)


async def _events(
    body: OpenAIBody, generation: Generation, choices: Sequence[Choice], head: dict[str, Any], write: Write
) -> AsyncGenerator[Events]:
    plain = head | ({"usage": None} if body.wants_usage_event else {})
    forms: dict[int, EventForm] = {}  # for the text of each answer that has begun
    with generation.run() as deltas:
        async for index, delta in deltas:
            choice = choices[index]
            if (text := delta.only_text) and (form := forms.get(index)) is not None:
                yield form.fill(text)
                continue
            if body.wants_usage_always:
                plain = head | {"usage": usage([generation.answers[index]], 1)}
            elif delta.parts:  # thoughts are shown before them
                form = forms[index] = EventForm({**plain, "choices": [choice.text_piece(EventForm.GAP)]})
                deltas.senders[index] = functools.partial(_send_text, form, write)
            if pieces := choice.pieces(delta):
                yield [{**plain, "choices": [piece]} for piece in pieces]
    if body.wants_usage_event:
        yield {**head, "choices": [], "usage": usage(generation.answers, body.num_answers)}


def _send_text(form: EventForm, write: Write, delta: AnswerDelta) -> bool:
    return bool(text := delta.only_text) and write(form.fill(text))


def head_of(response_id: str, front: Front) -> dict[str, Any]:
    """The fields with which every response and every event begins."""
    return {
        "id": response_id,
        "created": now(),
        "model": front.model_name,
        "system_fingerprint": _system_fingerprint(front),
    }


def rendered(prompt: Prompt) -> dict[str, Any]:
    """The tokens of a prompt, under vLLM's names and in the form of `json_pieces`.

    Raises RequestError for one that is not of tokens alone.
    """
    if prompt.media:
        raise RequestError(
            "a prompt with pictures or videos is not rendered, because tokens do not name them; leave them out"
        )
    return {"token_ids": _list_of(prompt.input_ids), "features": None}


def _list_of(ids: Iterable[int]) -> Iterator[bytes]:
    yield from list_pieces(list(ids))


def usage(answers: Sequence[Answer], n: int) -> dict[str, Any]:
    """The numbers of tokens of all answers, `n` for each prompt in turn; a prompt counts once."""
    prompt_tokens = sum(len(answer.request.input_ids) for answer in answers[::n])
    completion_tokens = sum(len(answer.token_ids) for answer in answers)
    reasoning_tokens = sum(answer.num_thought_tokens for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "reasoning_tokens": reasoning_tokens,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.cached_tokens for answer in answers[::n]),
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": sum(answer.predicted[0] for answer in answers),
            "rejected_prediction_tokens": sum(answer.predicted[1] for answer in answers),
        },
    }


def shown_logprob(logprob: float) -> float:
    """A log-probability in the range that JSON can express."""
    return max(logprob, LEAST_LOGPROB)


@final
class TokenNames:
    """The names of tokens in log-probabilities.

    Attributes:
        tokenizer: The model's.
    """

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool) -> None:
        """With `as_ids` the name of a token is "token_id:17", otherwise its text."""
        self.tokenizer = tokenizer
        self._as_ids = as_ids
        self._names: dict[int, str] = {}

    def name(self, token_id: int) -> str:
        """The name of a token."""
        name = self._names.get(token_id)
        if name is None:
            name = f"token_id:{token_id}" if self._as_ids else token_text(self.tokenizer, token_id)
            self._names[token_id] = name
        return name

    def raw(self, token_id: int) -> list[int]:
        """The bytes of a token."""
        return list(self.tokenizer.token_bytes(token_id))

    def scores(self, tokens: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        """The log-probabilities of tokens and of their alternatives, as chat completions and responses show them."""
        return [
            self._score(token.token_id, token.logprob or 0.0)
            | {"top_logprobs": [self._score(*candidate) for candidate in token.top]}
            for token in tokens
        ]

    def _score(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {"token": self.name(token_id), "bytes": self.raw(token_id), "logprob": shown_logprob(logprob)}


def now() -> int:
    """The `created` of a response."""
    return int(time.time())


def _system_fingerprint(front: Front) -> str:
    """A digest of everything that may change an answer to the same seed."""
    info, config = front.generator.info, front.engine_config
    types = (info.dtype, config.quantization, info.kv_dtype, config.load_format)
    return _digest((jsg.__version__, front.model_name, *types, info.device, config.deterministic))


@functools.lru_cache
def _digest(parts: tuple[object, ...]) -> str:
    return "fp_" + hashlib.sha256(repr(parts).encode()).hexdigest()[:10]
