"""Servers on real sockets that speak OpenAI's and Anthropic's wire formats around a toy model, and fail when told.

The toy models see text only: the next token is a function of all text so far, whatever tokens it came in. So an answer
that speculation gave can be compared with that of a call of its own.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from jsg.lang.words.backend import PromptItem, Session
from jsg.lang.words.ir import Gen, RoleBegin, RoleEnd, SamplingArgs, Text

PAGE = "Name: Ada Lovelace\nBorn: 1815\nField: mathematics\n"
TOKENS = ["Name", "Ada", " Love", "lace", "Born", " 18", "15", "Field", "mathe", "matics", " ", ":"]
END = ""  # the token at which a model ends by itself


class Toy(Protocol):
    def ranked(self, text: str) -> list[tuple[str, float]]:
        """Tokens with their logprobs, best first."""
        ...

    def count(self, text: str) -> int:
        """Tokens of a prompt."""
        ...


class HashToy:
    """Nonsense, but always the same."""

    def __init__(self, vocabulary: Sequence[str], end_share: float = 0.05):
        self.vocabulary = tuple(vocabulary)
        self.end_share = end_share

    def ranked(self, text: str) -> list[tuple[str, float]]:
        def weight(token: str) -> float:
            digest = hashlib.sha256(f"{text[-6:]}|{token}".encode()).digest()
            return (int.from_bytes(digest[:4]) + 1) / 2**32 * (self.end_share * 10 if token == END else 1.0)

        weights = {token: max(weight(token) ** 3, 1e-30) for token in (*self.vocabulary, END)}
        total = sum(weights.values())
        return sorted(((token, math.log(w / total)) for token, w in weights.items()), key=lambda item: -item[1])

    def count(self, text: str) -> int:
        return len(tokenize(text, self.vocabulary))


class Parrot:
    """Knows one text by heart and goes on with it behind the longest piece of it that it recognises."""

    def __init__(self, text: str, vocabulary: Sequence[str] = ()):
        self.text = text
        self.vocabulary = tuple(vocabulary)

    def ranked(self, text: str) -> list[tuple[str, float]]:
        tail = text[-len(self.text) :]
        length = next((k for k in range(len(tail), 0, -1) if tail[-k:] in self.text), 0)
        known = self.text.rindex(tail[-length:]) + length if length else 0
        rest = tokenize(self.text[known : known + 40], self.vocabulary)
        return [(rest[0] if rest else END, -0.1), ("?", -3.0)]

    def count(self, text: str) -> int:
        return len(tokenize(text, self.vocabulary))


def tokenize(text: str, vocabulary: Sequence[str]) -> list[str]:
    """The longest token of the vocabulary, again and again; a character where there is none."""
    tokens = []
    while text:
        token = max((one for one in vocabulary if text.startswith(one)), key=len, default=text[0])
        tokens.append(token)
        text = text[len(token) :]
    return tokens


@dataclasses.dataclass
class Fault:
    """What happens to one request instead of an answer.

    Attributes:
        status: It is answered with that status...
        headers: ... and these headers.
        after_tokens: It is answered, but the connection breaks after so many tokens.
        hangs: It is not answered at all, or not any more `after_tokens`, until the client goes away.
        event: The stream ends with this event...
        comes_first: ... before any text.
    """

    status: int = 0
    headers: dict[str, str] = dataclasses.field(default_factory=dict)
    after_tokens: int | None = None
    hangs: bool = False
    event: dict[str, Any] | None = None
    comes_first: bool = False


@dataclasses.dataclass
class Spoken:
    """One answer."""

    text: str
    tokens: list[tuple[str, float, list[tuple[str, float]]]]
    num_generated: int
    finish: str
    matched: str | None = None


def speak(toy: Toy, prompt: str, max_tokens: int, stops: Sequence[str], allowed: Callable[[str], bool]) -> Spoken:
    """A model's greedy continuation, cut at the first stop."""
    tokens: list[tuple[str, float, list[tuple[str, float]]]] = []
    text = ""
    while len(tokens) < max_tokens:
        ranked = [(token, logprob) for token, logprob in toy.ranked(prompt + text) if allowed(text + token)]
        token, logprob = ranked[0]
        if token == END:
            return Spoken(text, tokens, len(tokens), "stop")
        tokens.append((token, logprob, ranked))
        for char in token:
            text += char
            if found := [stop for stop in stops if text.endswith(stop)]:
                stop = max(found, key=len)
                return Spoken(text[: -len(stop)], tokens, len(tokens), "stop", stop)
    return Spoken(text, tokens, len(tokens), "length")


class WireServer:
    """One server for both formats.

    Attributes:
        toy: What it serves.
        answer: Says the answer to a chat or a prompt in the toy's place, if it is not None.
        requests: The bodies that came, in order, those that failed included.
        faults: What happens to the next requests.
        num_aborted: Streams that the client closed early.
        has_tokens: Logprobs are reported where they are asked for.
        prompt_tokens: Of all requests that were answered.
    """

    def __init__(self, toy: Toy):
        self.toy = toy
        self.answer: Callable[[dict[str, Any]], str] | None = None
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Fault] = []
        self.num_aborted = 0
        self.has_tokens = True
        self.aborted = threading.Event()
        self.prompt_tokens = 0
        self._closing = asyncio.Event()
        routes = [
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/messages", self._messages, methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        self.app = Starlette(routes=routes)
        self.url = ""

    @property
    def openai_url(self) -> str:
        return f"{self.url}/v1"

    async def _models(self, _request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_MODEL], "has_more": False, "first_id": None, "last_id": None})

    async def _take(self, request: Request) -> tuple[dict[str, Any], Fault | None]:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None and fault.hangs and fault.after_tokens is None:
            await self._until_gone(request)
        return body, fault

    async def _until_gone(self, request: Request) -> None:
        while not self._closing.is_set() and not await request.is_disconnected():
            await asyncio.sleep(0.005)

    def _say(self, prompt: str, body: dict[str, Any], stops: Sequence[str], forced: Sequence[str] = ()) -> Spoken:
        limit = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        toy = self.toy
        if self.answer is not None:
            toy = Parrot(prompt + self.answer(body), getattr(self.toy, "vocabulary", ()))
        if bias := body.get("logit_bias"):
            allowed = {toy.vocabulary[int(token)] for token in bias}  # pyright: ignore[reportAttributeAccessIssue]
            likely = next((token for token, _ in toy.ranked(prompt) if token in allowed), sorted(allowed)[0])
            return Spoken(likely, [(likely, -0.5, [])], 1, "length")
        if forced:
            best = max(forced, key=lambda choice: hashlib.sha256((prompt + choice).encode()).digest())
            return Spoken(best, [(best, -0.5, [(best, -0.5)])], 1, "stop")
        return speak(toy, prompt, limit, stops, lambda _text: True)

    async def _completions(self, request: Request) -> Response:
        body, fault = await self._take(request)
        if fault is not None and fault.status:
            return _openai_failure(fault)
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        forced = body.get("choices") or ()
        if body.get("echo"):
            return JSONResponse(self._echo(body, prompts))
        spoken = [self._say(p, body, _stops(body), forced) for p in prompts for _ in range(body.get("n") or 1)]
        usage = self._usage(prompts[0], sum(one.num_generated for one in spoken))
        wants = body.get("logprobs") is not None and self.has_tokens

        def event(index: int, text: str, tokens: list[Any], finish: str | None) -> dict[str, Any]:
            logprobs = _text_logprobs(tokens, body["logprobs"]) if wants else None
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
            return {"id": "c", "object": "text_completion", "created": 1, "model": "toy", "choices": [choice]}

        last = {"id": "c", "object": "text_completion", "created": 1, "model": "toy", "choices": [], "usage": usage}
        return self._stream(request, self._openai_events(spoken, event, last, fault), fault)

    def _echo(self, body: dict[str, Any], prompts: list[str]) -> dict[str, Any]:
        choices = []
        for index, prompt in enumerate(prompts):
            texts = tokenize(prompt, getattr(self.toy, "vocabulary", ()))
            tokens, before = [], ""
            for text in texts:
                scores = dict(self.toy.ranked(before))
                tokens.append((text, scores.get(text, -9.0) if before else None, []))
                before += text
            choice = {"index": index, "text": prompt, "logprobs": _text_logprobs(tokens, 0), "finish_reason": "length"}
            choices.append(choice)
        usage = {"prompt_tokens": sum(map(self.toy.count, prompts)), "completion_tokens": 0, "total_tokens": 0}
        return {
            "id": "c",
            "object": "text_completion",
            "created": 1,
            "model": "toy",
            "choices": choices,
            "usage": usage,
        }

    async def _chat(self, request: Request) -> Response:
        body, fault = await self._take(request)
        if fault is not None and fault.status:
            return _openai_failure(fault)
        prompt = render(body["messages"], goes_on=bool(body.get("continue_final_message")))
        form = (body.get("response_format") or {}).get("json_schema", {}).get("schema", {})
        enum = form.get("properties", {}).get("choice", {}).get("enum", ())
        spoken = [self._say(prompt, body, _stops(body), body.get("choices") or enum) for _ in range(body.get("n") or 1)]
        if enum:
            wrapped = json.dumps({"choice": spoken[0].text})
            spoken = [Spoken(wrapped, [(char, -0.1, []) for char in wrapped], len(wrapped), "stop")]
        usage = self._usage(prompt, sum(one.num_generated for one in spoken))
        wants = bool(body.get("logprobs")) and self.has_tokens

        def event(index: int, text: str, tokens: list[Any], finish: str | None) -> dict[str, Any]:
            content = [_chat_logprob(*token, body.get("top_logprobs") or 0) for token in tokens]
            choice = {
                "index": index,
                "delta": {"role": "assistant", "content": text},
                "logprobs": {"content": content, "refusal": None} if wants else None,
                "finish_reason": finish,
            }
            return {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "toy", "choices": [choice]}

        last = {
            "id": "c",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "toy",
            "choices": [],
            "usage": usage,
        }
        return self._stream(request, self._openai_events(spoken, event, last, fault), fault)

    async def _openai_events(
        self, spoken: list[Spoken], event: Callable[..., dict[str, Any]], last: dict[str, Any], fault: Fault | None
    ) -> AsyncIterator[str]:
        for index, one in enumerate(() if fault is not None and fault.comes_first else spoken):
            for text, tokens in _pieces(one):
                yield _sse(event(index, text, tokens, None))
            yield _sse(event(index, "", [], one.finish))
        if fault is not None and fault.event is not None:
            yield _sse(fault.event)
            return
        yield _sse(last)
        yield "data: [DONE]\n\n"

    async def _messages(self, request: Request) -> Response:
        body, fault = await self._take(request)
        if fault is not None and fault.status:
            error = {"type": "error", "error": {"type": "overloaded_error", "message": "told to fail"}}
            return JSONResponse(error, fault.status, fault.headers)
        if refusal := _anthropic_refusal(body):
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": refusal}}
            return JSONResponse(error, 400)
        system = "".join(part["text"] for part in body.get("system") or ())
        turns = [{"role": "system", "content": system}] if system else []
        prompt = render([*turns, *body["messages"]], goes_on=True)
        enum = [] if not body.get("tools") else body["tools"][0]["input_schema"]["properties"]["choice"]["enum"]
        spoken = self._say(prompt, body, body.get("stop_sequences") or (), enum)
        return self._stream(request, self._anthropic_events(prompt, spoken, bool(enum), fault), fault)

    async def _anthropic_events(
        self, prompt: str, spoken: Spoken, is_tool: bool, fault: Fault | None
    ) -> AsyncIterator[str]:
        counts = self._usage(prompt, spoken.num_generated)
        usage = {
            "input_tokens": counts["prompt_tokens"] - 1,
            "output_tokens": 1,
            "cache_read_input_tokens": 1,
            "cache_creation_input_tokens": 0,
        }
        message = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "model": "toy",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        yield _named({"type": "message_start", "message": message})
        yield _named({"type": "ping"})
        tool = {"type": "tool_use", "id": "t", "name": "choose", "input": {}}
        block = tool if is_tool else {"type": "text", "text": ""}
        yield _named({"type": "content_block_start", "index": 0, "content_block": block})
        pieces = [json.dumps({"choice": spoken.text})] if is_tool else [text for text, _ in _pieces(spoken)]
        for piece in () if fault is not None and fault.comes_first else pieces:
            delta = {"type": "input_json_delta", "partial_json": piece}
            delta = delta if is_tool else {"type": "text_delta", "text": piece}
            yield _named({"type": "content_block_delta", "index": 0, "delta": delta})
        if fault is not None and fault.event is not None:
            yield _named(fault.event)
            return
        yield _named({"type": "content_block_stop", "index": 0})
        reason = "tool_use" if is_tool else "max_tokens" if spoken.finish == "length" else "end_turn"
        end = {"stop_reason": "stop_sequence" if spoken.matched else reason, "stop_sequence": spoken.matched}
        usage = {"output_tokens": spoken.num_generated}
        yield _named({"type": "message_delta", "delta": end, "usage": usage})
        yield _named({"type": "message_stop"})

    def _usage(self, prompt: str, num_generated: int) -> dict[str, Any]:
        num_prompt = self.toy.count(prompt)
        self.prompt_tokens += num_prompt
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_generated,
            "total_tokens": num_prompt + num_generated,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    def _stream(self, request: Request, events: AsyncIterator[str], fault: Fault | None) -> Response:
        async def guarded() -> AsyncIterator[str]:
            num_sent, is_done = 0, False
            try:
                async for event in events:
                    if fault is not None and fault.after_tokens is not None and num_sent > fault.after_tokens:
                        if fault.hangs:
                            await self._until_gone(request)
                            return
                        raise _BrokenError
                    yield event
                    num_sent += 1
                    await asyncio.sleep(0)
                    if await request.is_disconnected():
                        return
                is_done = True
            finally:
                if not is_done:
                    self.num_aborted += 1
                    self.aborted.set()

        return StreamingResponse(guarded(), media_type="text/event-stream")

    @contextlib.contextmanager
    def running(self) -> Iterator["WireServer"]:
        """On a free port, in a thread."""
        with serving(self.app, self._closing) as self.url:
            yield self


@contextlib.contextmanager
def serving(app: Any, closing: asyncio.Event | None = None) -> Iterator[str]:
    """The address of an application that runs on a free port, in a thread; `closing` is set before it ends."""
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    ready = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.001)
        ready.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30)
    assert server.started
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        if closing is not None:
            loops[0].call_soon_threadsafe(closing.set)
        server.should_exit = True
        thread.join(30)


class _BrokenError(Exception):
    """Tears the connection down in the middle of a stream."""


_MODEL = {"id": "toy", "object": "model", "created": 1, "owned_by": "t", "type": "model", "display_name": "T",
          "created_at": "2026-01-01T00:00:00Z"}  # fmt: skip


def render(messages: list[dict[str, Any]], *, goes_on: bool) -> str:
    """A conversation as the toy sees it."""
    text = ""
    for number, message in enumerate(messages):
        content = message["content"]
        if not isinstance(content, str):
            content = "".join(part.get("text", "<image>") for part in content)
        is_open = goes_on and number == len(messages) - 1 and message["role"] == "assistant"
        text += f"<{message['role']}>{content}" + ("" if is_open else "</>\n")
    return text if messages and goes_on and messages[-1]["role"] == "assistant" else text + "<assistant>"


def _pieces(spoken: Spoken) -> Iterator[tuple[str, list[Any]]]:
    position = 0
    for token in spoken.tokens:
        text = spoken.text[position : position + len(token[0])]
        position += len(token[0])
        yield text, [token]


def _stops(body: dict[str, Any]) -> list[str]:
    stop = body.get("stop") or []
    return [stop] if isinstance(stop, str) else stop


def _text_logprobs(tokens: list[Any], num_top: int) -> dict[str, Any]:
    return {
        "tokens": [token for token, _, _ in tokens],
        "token_logprobs": [logprob for _, logprob, _ in tokens],
        "top_logprobs": [dict(ranked[:num_top]) for _, _, ranked in tokens] if num_top else None,
        "text_offset": [],
    }


def _chat_logprob(token: str, logprob: float, ranked: list[tuple[str, float]], num_top: int) -> dict[str, Any]:
    top = [{"token": one, "logprob": value, "bytes": None} for one, value in ranked[:num_top]]
    return {"token": token, "logprob": logprob, "bytes": None, "top_logprobs": top}


def _openai_failure(fault: Fault) -> Response:
    error = {"error": {"message": "told to fail", "type": "t", "param": None, "code": None}}
    return JSONResponse(error, fault.status, fault.headers)


def _anthropic_refusal(body: dict[str, Any]) -> str | None:
    """The refusals of the real API that programs may meet."""
    messages = body["messages"]
    if not messages or messages[0]["role"] != "user":
        return "messages: first message must use the user role"
    if any(message["role"] == "system" for message in messages):
        return "messages: unexpected role system"
    last = messages[-1]
    if last["role"] == "assistant" and (text := last["content"][-1]["text"]) != text.rstrip():
        return "messages: final assistant content cannot end with trailing whitespace"
    if any(not "".join(part.get("text", "<image>") for part in one["content"]).strip() for one in messages):
        return "messages: text content blocks must contain non-whitespace text"
    if any(one["role"] == other["role"] for one, other in itertools.pairwise(messages)):
        return "messages: roles must alternate"
    if any(not stop.strip() for stop in body.get("stop_sequences") or ()):
        return "stop_sequences: each stop sequence must contain non-whitespace"
    if body.get("temperature", 1.0) > 1:
        return "temperature: range: 0..1"
    return None


def _sse(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


def _named(event: dict[str, Any]) -> str:
    return f"event: {event['type']}\n{_sse(event)}"


@dataclasses.dataclass
class Written:
    """The result of one gen."""

    pieces: list[str]
    meta: dict[str, Any]
    others: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@contextlib.asynccontextmanager
async def closing(backend: Any) -> AsyncIterator[Any]:
    """The backend, which is closed behind the block."""
    try:
        yield backend
    finally:
        await backend.close()


async def write(session: Session, name: str | None = "x", **args: Any) -> Written:
    """One gen, greedy unless it says otherwise."""
    written = Written([], {}, ())
    given = SamplingArgs(**{"temperature": 0.0, **args})
    async for piece in session.generate(Gen(name, given)):
        assert not written.meta, "a piece came after the last"
        if piece.text:
            written.pieces.append(piece.text)
        written.meta, written.others = piece.meta or {}, piece.others
    assert written.meta
    return written


async def tell(session: Session, *items: PromptItem | str) -> str:
    """Appends constants; gives the text that they added."""
    return "".join([await session.extend(Text(item) if isinstance(item, str) else item) for item in items])


async def ask(session: Session, question: str = "Who?") -> None:
    """A user's turn, and the beginning of the assistant's."""
    await tell(session, RoleBegin("user"), question, RoleEnd("user"), RoleBegin("assistant"))
