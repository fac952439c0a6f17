"""The object of a response, and the events that tell how it is made."""

import dataclasses
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, final

from jsg.errors import JsgError
from jsg.processing.answer import Answer, AnswerDelta
from jsg.server.generation import Generation
from jsg.server.http.event_stream import Event
from jsg.server.http.failures import error_body
from jsg.server.openai.common import TokenNames, finish_of, shown_logprob
from jsg.types import FinishType, TokenLogprob

Object = dict[str, Any]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Reply:
    """One response, shown at any time while its answer is made.

    Attributes:
        response_id: Its name.
        item_id: The name of the message that is its output.
        asked: What it repeats of the request, under OpenAI's names.
        answer: What is generated; it grows.
        names: What log-probabilities call a token.
        created_at: Seconds since the epoch.
    """

    response_id: str
    item_id: str
    asked: Object
    answer: Answer
    names: TokenNames
    created_at: int

    def begun(self) -> Object:
        """The response before its output."""
        return self._shown("in_progress", [])

    def ended(self) -> Object:
        """The response with its whole output. Raises AbortedError when somebody ended it."""
        finish_of(self.answer)
        return self._shown("completed" if self.is_whole else "incomplete", [self.message()])

    def failed(self, message: str) -> Object:
        """The response of which something went wrong."""
        return self._shown("failed", [self.message()], {"code": "server_error", "message": message})

    @property
    def is_whole(self) -> bool:
        """Whether the model ended the answer."""
        return self.answer.finish is not None and self.answer.finish.type is FinishType.STOP

    def message(self) -> Object:
        """The output as far as it has come."""
        status = "completed" if self.is_whole else "incomplete"
        return self._message(status, [self.part(self.answer.text, self.answer.logprobs)])

    def empty_message(self) -> Object:
        """The output before it has come."""
        return self._message("in_progress", [])

    def part(self, text: str = "", logprobs: Sequence[TokenLogprob] = ()) -> Object:
        """The one part of the output's content."""
        return {"type": "output_text", "annotations": [], "logprobs": self.scores(logprobs), "text": text}

    def scores(self, logprobs: Sequence[TokenLogprob]) -> list[Object]:
        """Log-probabilities of tokens; none where they were not asked for."""
        return [
            self._score(token.token_id, token.logprob or 0.0)
            | {"top_logprobs": [self._score(*candidate) for candidate in token.top]}
            for token in logprobs
        ]

    def _score(self, token_id: int, logprob: float) -> Object:
        names = self.names
        return {"token": names.name(token_id), "bytes": names.raw(token_id), "logprob": shown_logprob(logprob)}

    def _message(self, status: str, content: list[Object]) -> Object:
        return {"type": "message", "id": self.item_id, "status": status, "role": "assistant", "content": content}

    def _shown(self, status: str, output: list[Object], error: Object | None = None) -> Object:
        is_cut = status == "incomplete"
        return {
            **self.asked,
            "id": self.response_id,
            "object": "response",
            "created_at": self.created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": None if status == "in_progress" else _usage(self.answer),
        }


async def events_of(reply: Reply, generation: Generation, on_end: Callable[[Object], Object]) -> AsyncGenerator[Event]:
    """The events of a response, in OpenAI's order; the first comes with the first token.

    Args:
        reply: The response.
        generation: Of its one answer.
        on_end: Takes the response that has ended and gives what the client is shown.

    Raises:
        JsgError: It failed before the first event; a later failure is told by the last events.
    """
    number = itertools.count()

    def event(name: str, **fields: Any) -> Event:
        return {"type": name, "sequence_number": next(number), **fields}

    at_item = {"item_id": reply.item_id, "output_index": 0, "content_index": 0}
    has_begun = False
    try:
        async with aclosing(generation.run()) as deltas:
            async for _, delta in deltas:
                if not has_begun:
                    has_begun = True
                    for opening in _opening(reply, event, at_item):
                        yield opening
                if delta.text or delta.logprobs:
                    yield event("response.output_text.delta", **at_item, **_shown_delta(reply, delta))
        ended = on_end(reply.ended())
    except JsgError as error:
        if not has_begun:
            raise
        failure = error_body(generation.call.route, error)["error"]
        yield event("error", code=failure["code"] or "server_error", message=failure["message"], param=failure["param"])
        yield event("response.failed", response=reply.failed(failure["message"]))
        return
    for closing in _closing(event, at_item, ended):
        yield closing


def _shown_delta(reply: Reply, delta: AnswerDelta) -> Object:
    return {"delta": delta.text, "logprobs": reply.scores(delta.logprobs) if delta.logprobs else []}


def _opening(reply: Reply, event: Callable[..., Event], at_item: Object) -> Iterator[Event]:
    begun = reply.begun()
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    yield event("response.output_item.added", output_index=0, item=reply.empty_message())
    yield event("response.content_part.added", **at_item, part=reply.part())


def _closing(event: Callable[..., Event], at_item: Object, ended: Object) -> Iterator[Event]:
    message = ended["output"][0]
    part = message["content"][0]
    yield event("response.output_text.done", **at_item, text=part["text"], logprobs=part["logprobs"])
    yield event("response.content_part.done", **at_item, part=part)
    yield event("response.output_item.done", output_index=0, item=message)
    yield event(f"response.{ended['status']}", response=ended)


def _usage(answer: Answer) -> Object:
    num_prompt, num_output = len(answer.request.input_ids), len(answer.token_ids)
    cached = answer.cached_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": num_prompt - cached},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_output,
    }
