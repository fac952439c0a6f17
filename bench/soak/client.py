"""Sends a task, checks its answers as far as that is possible without others, and returns them to be compared later."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgspec

from bench.serving.sse import DONE, EventDecoder
from bench.soak.mix import GENERATE, Json, Kind, Task

LIMIT_S = 120  # the most seconds for any answer


class Broken(Exception):
    """The server did something wrong, which the message names."""


@dataclasses.dataclass(slots=True)
class Answer:
    """One answer of a request.

    Attributes:
        text: Its text.
        ids: Its tokens, if the endpoint gives them.
        finish: Its finish reason; None before the end.
    """

    text: str = ""
    ids: list[int] | None = None
    finish: str | None = None


class Client:
    """Talks to one server."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str):
        self._http = session
        self._base_url = base_url

    async def run(self, task: Task) -> list[Answer] | None:
        """Runs a task. Returns its answers if it ended by itself.

        Raises:
            Broken: A status or an answer is wrong.
        """
        try:
            async with asyncio.timeout(LIMIT_S):
                if task.kind in (Kind.INVALID, Kind.OVER_LONG):
                    await self._expect_refusal(task)
                    return None
                if task.streams:
                    return await self._run_stream(task)
                return check_whole(task, await self._ask(task.path, task.body))
        except TimeoutError:
            raise Broken(f"the answer did not end within {LIMIT_S} s") from None
        except aiohttp.ClientError as error:
            raise Broken(f"the connection failed: {type(error).__name__} {error}") from None

    async def replay(self, task: Task) -> list[Answer]:
        """The answers of a task that is sent again without streaming. Raises Broken."""
        return check_whole(task, await self._ask(task.path, task.alone()))

    async def abort(self, rid: str) -> None:
        """Aborts a request. Raises Broken."""
        await self._ask("/abort_request", {"rid": rid}, wants_json=False)

    async def get(self, path: str) -> bytes:
        """The answer to a GET of a path. Raises Broken."""
        async with self._http.get(self._base_url + path) as response:
            if response.status != 200:
                raise Broken(f"GET {path} answered {response.status}")
            return await response.read()

    async def flush_cache(self) -> None:
        """Empties the prefix cache. Raises Broken."""
        await self._ask("/flush_cache", {}, wants_json=False)

    async def _ask(self, path: str, body: Json, *, wants_json: bool = True) -> Any:
        async with self._post(path, body) as response:
            content = await response.read()
            if response.status != 200:
                raise Broken(f"POST {path} answered {response.status}: {content[:200]!r}")
            return msgspec.json.decode(content) if wants_json else None

    def _post(self, path: str, body: Json) -> Any:
        headers = {"Content-Type": "application/json"}
        return self._http.post(self._base_url + path, data=msgspec.json.encode(body), headers=headers)

    async def _expect_refusal(self, task: Task) -> None:
        async with self._post(task.path, task.body) as response:
            content = await response.read()
            if not 400 <= response.status < 500:
                raise Broken(f"a bad request was answered {response.status}: {content[:200]!r}")
            with contextlib.suppress(msgspec.DecodeError, KeyError, TypeError):
                if msgspec.json.decode(content)["error"]["message"]:
                    return
            raise Broken(f"a refusal without a message: {content[:200]!r}")

    async def _run_stream(self, task: Task) -> list[Answer] | None:
        """Reads a stream to its end, or disconnects or aborts it before."""
        reading = Reading(task)
        async with self._post(task.path, task.body) as response:
            if response.status != 200:
                raise Broken(f"POST {task.path} answered {response.status}: {(await response.read())[:200]!r}")
            is_aborted = False
            async for event in _events(response):
                if task.cut_after is not None and reading.num_events >= task.cut_after and not is_aborted:
                    if task.kind is Kind.DISCONNECT:
                        response.close()
                        return None
                    await self.abort(task.body["rid"])
                    is_aborted = True
                reading.take(event)
        answers = reading.end()
        return None if any(answer.finish == "abort" for answer in answers) else answers


class Reading:
    """The growing answers of a stream. Raises Broken for a token that is lost, doubled or late."""

    def __init__(self, task: Task):
        self.num_events = 0
        self._task = task
        self._answers = [Answer() for _ in range(1)]
        self._is_done = False
        self._usage: Json | None = None

    def take(self, data: bytes) -> None:
        """Reads the next event."""
        if self._is_done:
            raise Broken("an event after [DONE]")
        if data == DONE:
            self._is_done = True
            return
        self.num_events += 1
        event = msgspec.json.decode(data)
        if "error" in event:
            raise Broken(f"an error event: {event['error']}")
        if self._answers[0].finish is not None and event.get("choices") != []:
            raise Broken("an event after the finish reason")
        if self._task.path == GENERATE:
            self._take_native(event)
        else:
            self._take_openai(event)

    def _take_native(self, event: Json) -> None:
        before, now = self._answers[0], _native_answer(event)
        if before.ids is not None and now.ids is not None and now.ids[: len(before.ids)] != before.ids:
            raise Broken("tokens of a stream changed afterwards")
        if not now.text.startswith(before.text):
            raise Broken("the text of a stream changed afterwards")
        self._answers[0] = now

    def _take_openai(self, event: Json) -> None:
        self._usage = event.get("usage") or self._usage
        for choice in event["choices"]:
            self._answers[0].text += _text_of(choice, "delta")
            self._answers[0].finish = choice["finish_reason"]

    def end(self) -> list[Answer]:
        """The complete answers."""
        if not self._is_done:
            raise Broken("a stream ended without [DONE]")
        if self._task.path != GENERATE and self._usage is None:
            raise Broken("a stream ended without its usage")
        check_lengths(self._task, self._answers, self._usage)
        return self._answers


def check_whole(task: Task, content: Any) -> list[Answer]:
    """The answers of a response that is not streamed."""
    if task.path == GENERATE:
        answers = [_native_answer(item) for item in (content if isinstance(content, list) else [content])]
        check_lengths(task, answers, None)
        return answers
    answers = [
        Answer(text=_text_of(choice, "message"), finish=choice["finish_reason"]) for choice in content["choices"]
    ]
    check_lengths(task, answers, content["usage"])
    return answers


def _text_of(choice: Json, member: str) -> str:
    """The text of a completion, or of a message (or the part of one in an event) with the arguments of its calls."""
    if "text" in choice:
        return choice["text"]
    message = choice[member]
    calls = message.get("tool_calls") or []
    return (message.get("content") or "") + "".join(call["function"].get("arguments") or "" for call in calls)


def check_lengths(task: Task, answers: list[Answer], usage: Json | None) -> None:
    """Checks the numbers of answers and tokens against what was asked for and what the server says. Raises Broken."""
    sampling = task.body.get("sampling_params", task.body)
    if len(answers) != sampling["n"]:
        raise Broken(f"{sampling['n']} answers were asked for, but {len(answers)} came")
    allowed = {"length"} if sampling.get("ignore_eos") else {"length", "stop"}
    if task.kind is Kind.TOOL:
        allowed = {"length", "tool_calls"}
    if task.kind is Kind.ABORT:
        allowed.add("abort")
    for answer in answers:
        if answer.finish not in allowed:
            raise Broken(f"finish reason {answer.finish!r}, but one of {sorted(allowed)} was due")
        if answer.ids is not None and answer.finish == "length" and len(answer.ids) != task.max_tokens:
            raise Broken(f"{task.max_tokens} tokens were asked for, but {len(answer.ids)} came")
        if task.kind in (Kind.FORM, Kind.TOOL) and answer.finish != "length":
            check_form(answer.text)
    if usage is not None and {answer.finish for answer in answers} == {"length"}:
        expected = len(answers) * task.max_tokens
        if usage["completion_tokens"] != expected:
            raise Broken(f"{expected} tokens were asked for, but usage says {usage['completion_tokens']}")


def check_form(text: str) -> None:
    """Checks a complete answer under one of the mix's schemas. Raises Broken."""
    try:
        form = msgspec.json.decode(text)
    except msgspec.DecodeError:
        raise Broken(f"an answer under a schema is no JSON: {text!r}") from None
    if not isinstance(form, dict) or len(form) != 2 or not isinstance(form.get("count"), int):
        raise Broken(f"an answer is not what its schema says: {text!r}")


def _native_answer(item: Json) -> Answer:
    meta = item["meta_info"]
    if meta["completion_tokens"] != len(item["output_ids"]):
        raise Broken(f"{meta['completion_tokens']} tokens are counted, but {len(item['output_ids'])} are there")
    reason = meta["finish_reason"]
    return Answer(item["text"], item["output_ids"], None if reason is None else reason["type"])


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    decoder = EventDecoder()
    async for chunk in response.content.iter_any():
        for event in decoder.feed(chunk):
            yield event
    for event in decoder.finish():
        yield event
