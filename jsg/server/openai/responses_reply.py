"""The object of a response and its output items, while its answer grows."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, final

from jsg.processing.growing_text import GrowingText
from jsg.server.generation import Generation
from jsg.server.http.json_pieces import JsonLists
from jsg.server.openai.common import TokenNames
from jsg.server.openai.responses_tools import InputReader, Origin
from jsg.server.shared.answers import finish_of, reports_of, step_of
from jsg.speech.answers.answer import Answer, AnswerDelta
from jsg.speech.answers.tool_calls import CallDelta, ContentDelta
from jsg.speech.rules.thinking import sealed
from jsg.token_scores import GrowingScores
from jsg.types import FinishType, TokenLogprob

Object = dict[str, Any]
TEXT = "response.output_text.delta"
Change = tuple[str, Object]
"""The type of an event, and its other fields."""


@final
@dataclasses.dataclass(slots=True)
class OutputItem:
    """A message, thoughts or a call of the model. It grows until it is done.

    Attributes:
        item_id: Its name.
        index: Its index in the response's output.
        kind: What it is, in OpenAI's words.
        grown: The text of a message, the thoughts, the arguments of a call, or the input of a custom tool.
        logprobs: The log-probabilities of a message's tokens, where the client asked for them.
        json: These as JSON, once the message is shown whole.
        call_id: The name of a call.
        name: The name of the tool that is called.
        namespace: The namespace of this name; None for none.
        status: The status, in OpenAI's words.
    """

    item_id: str
    index: int
    kind: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    grown: GrowingText = dataclasses.field(default_factory=GrowingText)
    logprobs: GrowingScores = dataclasses.field(default_factory=GrowingScores)
    json: JsonLists | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    status: str = "in_progress"

    @property
    def text(self) -> str:
        """What has grown."""
        return str(self.grown)


@final
class Reply:
    """One response, shown at any time while its answer is made.

    Attributes:
        response_id: Its name.
        answer: The answer that is generated; it grows.
        items: The output so far. All items but the last are done.
    """

    def __init__(
        self,
        rid: str,
        asked: Object,
        answer: Answer,
        origins: Mapping[str, Origin],
        names: TokenNames,
        created_at: int,
        *,
        seals_thoughts: bool = False,
    ) -> None:
        """A response that has not begun.

        Args:
            rid: The part that the names of the response and of its items share.
            asked: The fields that the response repeats of the request, under OpenAI's names.
            answer: The answer that is generated.
            origins: Name by which the model calls a tool → the tool of the client.
            names: The names of tokens in log-probabilities.
            created_at: Seconds since the epoch.
            seals_thoughts: Thoughts are shown a second time, as `sealed` gives them.
        """
        self.response_id = f"resp_{rid}"
        self.answer = answer
        self.items: list[OutputItem] = []
        self._rid = rid
        self._asked = asked
        self._origins = origins
        self._input = InputReader()  # of the last item
        self._names = names
        self._created_at = created_at
        self._seals_thoughts = seals_thoughts

    def begun(self) -> Object:
        """The response before its output."""
        return self._shown("in_progress", [])

    def ended(self) -> Object:
        """The response with its whole output. Raises AbortedError where it was aborted."""
        finish_of(self.answer)
        return self._shown("completed" if self.is_whole else "incomplete", [self.shown(item) for item in self.items])

    def failed(self, message: str) -> Object:
        """The response that failed, with its output so far."""
        output = [self.shown(item) for item in self.items]
        return self._shown("failed", output, {"code": "server_error", "message": message})

    @property
    def is_whole(self) -> bool:
        """Whether the model itself ended the answer."""
        return self.answer.finish is not None and self.answer.finish.type is FinishType.STOP

    def take(self, delta: AnswerDelta) -> Iterator[Change]:
        """Takes a delta of the answer; yields the changes in the output. Takes every delta once and in order."""
        if delta.thoughts:
            yield from self._grow_thoughts(delta.thoughts)
        for part in delta.parts:
            match part:
                case ContentDelta(text, logprobs):
                    if not self.items or self.items[-1].kind != "message":
                        yield from self._begin_message()
                    message = self.items[-1]
                    message.grown.append(text)
                    message.logprobs += logprobs
                    shown = {"delta": text, "logprobs": self._shown_scores(logprobs)}
                    yield TEXT, {**_place_in(message), **shown}
                case CallDelta():
                    yield from self._grow_call(part)

    async def take_all(self, generation: Generation) -> None:
        """Generates the answer and takes it to its end. Raises as `Generation.run`."""
        with generation.run(is_read=False) as deltas:
            async for _, delta in deltas:
                for _change in self.take(delta):
                    pass
        for _change in self.end():
            pass

    def end(self) -> Iterator[Change]:
        """Ends the output; yields the changes in it. Must be called once, after the last delta."""
        if not self.items or (self.items[-1].kind == "reasoning" and self.is_whole):
            yield from self._begin_message()
        yield from self._end_last("completed" if self.is_whole else "incomplete")

    def shown(self, item: OutputItem) -> Object:
        """An item as the client sees it now."""
        if item.kind == "reasoning":
            return shown_thoughts(
                item.item_id, item.text, item.status, is_sealed=self._seals_thoughts and item.status != "in_progress"
            )
        if item.kind == "message":
            content = [] if item.status == "in_progress" and not item.text else [self._part(item)]
            return {
                "type": "message",
                "id": item.item_id,
                "status": item.status,
                "role": "assistant",
                "content": content,
            }
        return shown_call(item.item_id, item.status, item.call_id, item.name, item.namespace, **_said(item))

    def _begin_message(self) -> Iterator[Change]:
        number = len(self.items)
        item = OutputItem(f"msg_{self._rid}" + (f"_o{number}" if number else ""), number, "message")
        yield from self._begin(item)
        yield "response.content_part.added", {**_place_in(item), "part": self._part(item)}

    def _grow_thoughts(self, thoughts: str) -> Iterator[Change]:
        if not self.items:
            item = OutputItem(f"rs_{self._rid}_o0", 0, "reasoning")
            yield from self._begin(item)
            yield "response.content_part.added", {**_place_in(item), "part": _thought_part("")}
        item = self.items[-1]
        item.grown.append(thoughts)
        yield "response.reasoning_text.delta", {**_place_in(item), "delta": thoughts}

    def _grow_call(self, part: CallDelta) -> Iterator[Change]:
        if part.name is not None:
            origin = self._origins.get(part.name, Origin(part.name))
            kind, letters = ("custom_tool_call", "ctc") if origin.is_custom else ("function_call", "fc")
            number, self._input = len(self.items), InputReader()
            item_id = f"{letters}_{self._rid}_o{number}"
            yield from self._begin(
                OutputItem(item_id, number, kind, call_id=part.id, name=origin.name, namespace=origin.namespace)
            )
        item = self.items[-1]
        is_custom = item.kind == "custom_tool_call"
        if delta := self._input.push(part.arguments) if is_custom else part.arguments:
            item.grown.append(delta)
            yield f"response.{_GROWS[item.kind]}.delta", {**_place_of(item), "delta": delta}

    def _begin(self, item: OutputItem) -> Iterator[Change]:
        if self.items:
            yield from self._end_last("completed")
        self.items.append(item)
        yield "response.output_item.added", {"output_index": item.index, "item": self.shown(item)}

    def _end_last(self, status: str) -> Iterator[Change]:
        item = self.items[-1]
        item.status = status
        match item.kind:
            case "message":
                part = self._part(item)
                text = {"text": part["text"], "logprobs": part["logprobs"]}
                yield "response.output_text.done", {**_place_in(item), **text}
                yield "response.content_part.done", {**_place_in(item), "part": part}
            case "reasoning":
                yield "response.reasoning_text.done", {**_place_in(item), "text": item.text}
                yield "response.content_part.done", {**_place_in(item), "part": _thought_part(item.text)}
            case "function_call":
                yield f"response.{_GROWS[item.kind]}.done", {**_place_of(item), "name": item.name, **_said(item)}
            case "custom_tool_call":
                yield f"response.{_GROWS[item.kind]}.done", {**_place_of(item), **_said(item)}
        yield "response.output_item.done", {"output_index": item.index, "item": self.shown(item)}

    def _part(self, message: OutputItem) -> Object:
        """The one part of a message's content."""
        scored = message.logprobs
        if message.json is None:
            message.json = self._lists(scored)
        shown = message.json.until(len(scored))["logprobs"]
        return {"type": "output_text", "annotations": [], "logprobs": shown, "text": message.text}

    def _lists(self, scored: Sequence[TokenLogprob]) -> JsonLists:
        names = self._names  # and not itself: the item that this reply holds keeps the function

        def show(start: int, stop: int) -> dict[str, list[Any]]:
            return {"logprobs": names.scores(scored[start:stop])}

        return JsonLists(show, step_of(self.answer.request))

    def _shown_scores(self, scored: Sequence[TokenLogprob]) -> list[Any] | Iterable[bytes]:
        is_long = len(scored) > step_of(self.answer.request)
        return self._lists(scored).until(len(scored))["logprobs"] if is_long else self._names.scores(scored)

    def _shown(self, status: str, output: list[Object], error: Object | None = None) -> Object:
        is_cut = status == "incomplete"
        return {
            **self._asked,
            "id": self.response_id,
            "object": "response",
            "created_at": self._created_at,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": output,
            "usage": None if status == "in_progress" else _usage(self.answer),
            **({} if self.answer.finish is None or status == "in_progress" else reports_of(self.answer)),
        }


_GROWS = {"function_call": "function_call_arguments", "custom_tool_call": "custom_tool_call_input"}


def _said(call: OutputItem) -> Object:
    return {"input" if call.kind == "custom_tool_call" else "arguments": call.text}


def shown_call(
    item_id: str, status: str, call_id: str | None, name: str | None, namespace: str | None, **said: str
) -> Object:
    """The item of a call: of a function with `arguments`, or of a custom tool with `input`."""
    kind = "custom_tool_call" if "input" in said else "function_call"
    shown = {"type": kind, "id": item_id, "status": status, "call_id": call_id, "name": name}
    return shown | said | ({} if namespace is None else {"namespace": namespace})


def shown_thoughts(item_id: str, text: str, status: str, *, is_sealed: bool = False) -> Object:
    """The item of the thoughts of an answer. Sealed, it has them a second time, in one word."""
    return {
        "type": "reasoning",
        "id": item_id,
        "status": status,
        "summary": [],
        "content": [_thought_part(text)] if text else [],
        "encrypted_content": sealed(text) if is_sealed else None,
    }


def _thought_part(text: str) -> Object:
    return {"type": "reasoning_text", "text": text}


def _place_of(item: OutputItem) -> Object:
    return {"item_id": item.item_id, "output_index": item.index}


def _place_in(message: OutputItem) -> Object:
    return {**_place_of(message), "content_index": 0}


def _usage(answer: Answer) -> Object:
    num_prompt, num_output = len(answer.request.input_ids), len(answer.token_ids)
    cached = answer.cached_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": num_prompt - cached},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": answer.num_thought_tokens},
        "total_tokens": num_prompt + num_output,
    }
