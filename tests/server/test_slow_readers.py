"""A client that reads slowly or leaves costs the event loop no more than one that reads."""

import asyncio
import contextlib
import copy
import functools
import gc
import json
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import Any, cast

import pytest
from starlette.requests import Request as HttpRequest

from jsg.engine.front.client import EngineClient
from jsg.errors import ContextLengthError, JsgError, RequestError
from jsg.processing.tokenizer import Tokenizer, load_tokenizer
from jsg.server.caller import ApiCall, Caller
from jsg.server.generation import Generator
from jsg.server.http.event_stream import COMMENT, Event, respond_with_events
from jsg.server.http.json_pieces import AT_ONCE, PIECE_BYTES, JsonLists, json_pieces, list_pieces
from jsg.server.http.long_response import respond_in_pieces
from jsg.server.loop_share import UNITS, LoopShare
from jsg.server.telemetry.exchange import EndpointTable, Exchange, WatchExchanges
from jsg.speech.answers.answer import Prompt
from jsg.types import FinishReason, FinishType, Request, RequestOutput, SamplingParams
from tests.server.scripted import Generating

NUM_TOKENS = 50
TEXT = "ab" * (NUM_TOKENS // 2)
CALL = ApiCall(caller=Caller(), route="/generate")


class ScriptedClient(Generating):
    """Gives "abab..." token by token; the event loop turns once before each. The last prompt token is how it ends."""

    most_requests = 1000

    class info:
        caches_states = False
        max_request_tokens = 100
        vocab_size = 512
        embedder = None

    async def generate(
        self, request: Request, owner: str = "", *, is_streamed: bool = True, grammar_turns: object = None
    ) -> AsyncGenerator[RequestOutput]:
        for index in range(NUM_TOKENS):
            await asyncio.sleep(0)
            is_last = index == NUM_TOKENS - 1
            if is_last and request.input_ids[-1] == 1:
                raise JsgError("the last token failed")
            token_ids = ((64, 65)[index % 2],)
            yield RequestOutput(
                rid=request.rid, token_ids=token_ids, finish=FinishReason(FinishType.LENGTH) if is_last else None
            )


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir) -> Tokenizer:
    return load_tokenizer(tokenizer_dir)


def make_generator(tokenizer: Tokenizer) -> Generator:
    return Generator(cast(EngineClient, ScriptedClient()), tokenizer, random_seed=0)


def prompt(last_token: int = 0, num_tokens: int = 1, **sampling: Any) -> Prompt:
    input_ids = (0,) * (num_tokens - 1) + (last_token,)
    return Prompt(rid="r", input_ids=input_ids, sampling=SamplingParams(max_new_tokens=NUM_TOKENS, **sampling))


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ends", ["whole", "failed", "left"])
def test_answers_that_have_ended_do_not_wait_for_the_collector(tokenizer, ends: str):
    async def run() -> weakref.ref:
        generation = await make_generator(tokenizer).begin(CALL, [prompt(int(ends == "failed"), n=2)])
        with contextlib.suppress(JsgError), generation.run() as deltas:
            async for _ in deltas:
                if ends == "left":
                    break
        return weakref.ref(generation)

    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()


async def test_what_waits_for_a_slow_reader_is_one_delta_of_each_answer(tokenizer):
    generation, read = await make_generator(tokenizer).begin(CALL, [prompt(n=3)]), []
    with generation.run() as deltas:
        async for index, delta in deltas:
            read.append((index, delta))
            seen = "".join(each.text for i, each in read if i == index)
            assert generation.answers[index].text == seen, "a delta brings its answer up to date"
            await turns(5 * NUM_TOKENS)
    assert len(read) <= 6
    for index in range(3):
        deltas = [delta for i, delta in read if i == index]
        assert "".join(delta.text for delta in deltas) == TEXT
        assert sum(len(delta.token_ids) for delta in deltas) == NUM_TOKENS
        assert [delta.finish is not None for delta in deltas] == [False] * (len(deltas) - 1) + [True]


async def test_a_quick_reader_gets_every_token_by_itself(tokenizer):
    generation = await make_generator(tokenizer).begin(CALL, [prompt()])
    with generation.run() as deltas:
        assert [delta.text async for _, delta in deltas] == list(TEXT)


async def test_readers_of_long_lists_share_the_turns_of_the_loop():
    turn, made, share = 0, list[int](), LoopShare()

    def show(start: int, stop: int) -> dict[str, list[int]]:
        made.extend([turn] * (stop - start))
        return {"ids": [*range(start, stop)], "names": [str(number) for number in range(start, stop)]}

    async def read() -> bytes:
        sent = list[bytes]()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        async def receive() -> dict[str, Any]:
            return await asyncio.Future()

        lists = JsonLists(show, 1)
        pieces = json_pieces([lists.until(3), lists.until(5) | {"end": None}])
        response = await respond_in_pieces(pieces, functools.partial(share.turn, ""))
        await response({"type": "http", "headers": []}, receive, send)
        return b"".join(sent)

    working = asyncio.gather(*(read() for _ in range(30)))
    while not working.done():
        turn += 1
        await asyncio.sleep(0)
    for body in working.result():
        first, second = json.loads(body)
        assert first == {"ids": [0, 1, 2], "names": ["0", "1", "2"]}
        assert second == {"ids": [0, 1, 2, 3, 4], "names": ["0", "1", "2", "3", "4"], "end": None}
    assert len(made) == 30 * 5
    assert max(map(made.count, made)) <= UNITS + 1


@pytest.mark.parametrize("named", [False, True])
async def test_a_long_event_is_sent_in_pieces_without_a_comment_inside(named: bool):
    """Its first list is made in four turns, in which comments are due."""
    num_turns, sent = 0, list[bytes]()

    async def events() -> AsyncGenerator[Event]:
        lists = JsonLists(lambda start, stop: {"texts": ["\u2028"] * (stop - start)}, 2)
        yield {"type": "a", "long": lists.until(8)["texts"], "short": list_pieces([1, 2])}
        await asyncio.sleep(0.02)
        yield {"type": "b"}

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def turn() -> None:
        nonlocal num_turns
        num_turns += 1
        await asyncio.sleep(0.005)

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    response = respond_with_events(HttpRequest(scope, receive), events(), named=named, beat_s=0.001, turn=turn)
    await response(scope, receive, send)
    name = b"event: a\n" if named else b""
    escaped = b",".join([b'"\\u2028"'] * 8)
    whole = name + b'data: {"type":"a","long":[' + escaped + b'],"short":[1,2]}\n\n'
    body = b"".join(sent)
    assert body.startswith(whole) and num_turns == 4
    assert COMMENT in body[len(whole) :] and body[len(whole) :].replace(COMMENT, b"").count(b"data: {") == 1


def test_a_failure_reaches_a_slow_reader(tokenizer):
    async def main() -> None:
        generation = await make_generator(tokenizer).begin(CALL, [prompt(), prompt(1)])
        with generation.run() as deltas:
            async for _ in deltas:
                await turns(5 * NUM_TOKENS)

    with pytest.raises(JsgError, match="the last token failed"):
        asyncio.run(main())


def test_a_prompt_that_is_too_long_is_refused_before_it_is_multiplied(tokenizer):
    generator = make_generator(tokenizer)
    assert len(asyncio.run(generator.begin(CALL, [prompt(num_tokens=50, n=128)])).answers) == 128
    with pytest.raises(ContextLengthError, match=r"at most 100, but got 51 \+ 50"):
        asyncio.run(generator.begin(CALL, [prompt(num_tokens=51, n=128)]))


def test_tokens_are_counted_before_they_are_multiplied(tokenizer, monkeypatch):
    monkeypatch.setattr("jsg.server.generation.MAX_PROMPT_TOKENS", 1000)
    generator = make_generator(tokenizer)
    generation = asyncio.run(generator.begin(CALL, [prompt(num_tokens=50, n=10), prompt(num_tokens=50, n=10)]))
    assert len(generation.answers) == 20
    with pytest.raises(RequestError, match="prompts times n must be at most 1000 prompt tokens, but got 1050"):
        asyncio.run(generator.begin(CALL, [prompt(num_tokens=50, n=10), prompt(num_tokens=50, n=11)]))


async def test_a_client_that_leaves_is_noticed_between_events_that_wait_for_nothing():
    closed = asyncio.Event()
    sent: list[Any] = []

    async def events() -> AsyncGenerator[Event]:
        try:
            for number in range(10_000):
                yield {"number": number}
        finally:
            closed.set()

    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # as uvicorn's when the client has left: it waits for nothing
        sent.append(message)
        if len(sent) == 10:
            left.set()

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    response = respond_with_events(HttpRequest(scope, receive), events())
    await response(scope, receive, send)
    assert 10 <= len(sent) < 30
    assert closed.is_set()


async def test_nothing_is_made_for_a_client_that_left_without_reading():
    """One event has all that it did not read: 30 such clients kept the event loop from every other for 17 s."""
    made: list[int] = []

    async def events() -> AsyncGenerator[Event]:
        for number in range(10):
            made.append(number)
            yield {"number": number}

    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # as uvicorn's: what waits for the reader goes on when it has left
        if message["type"] == "http.response.body" and len(made) == 3:
            asyncio.get_running_loop().call_soon(left.set)
            await left.wait()

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": [], "query_string": b""}
    response = respond_with_events(HttpRequest(scope, receive), events())
    await response(scope, receive, send)
    assert made == [0, 1, 2]


STREAMS = [("/generate", False), ("/debug/radix/events", True), ("/v1/messages", True), ("/v1/responses", True)]


@pytest.mark.parametrize(("path", "named"), STREAMS)
@pytest.mark.parametrize("event", [None, {"type": "a", "number": object()}], ids=["generator", "encoder"])
async def test_what_nobody_foresaw_ends_a_stream_with_an_error_and_a_trace(event, path, named, caplog):
    sent: list[bytes] = []

    async def events() -> AsyncGenerator[Event]:
        yield {"type": "a"}
        if event is not None:
            yield event
        raise ZeroDivisionError("a secret")

    async def receive() -> dict[str, Any]:
        return await asyncio.Future()

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "query_string": b""}
    response = respond_with_events(HttpRequest(scope, receive), events(), named=named)
    await response(scope, receive, send)
    assert b"secret" not in b"".join(sent) and b"internal error" in sent[1]
    assert (b"event: error" in sent[1]) == named and sent[2] == (b"" if named else b"data: [DONE]\n\n")
    [record] = caplog.records
    assert record.exc_info is not None


@pytest.mark.parametrize("size", [0, 1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 3 * AT_ONCE])
def test_the_pieces_of_a_list_are_its_json(size: int):
    for whole in ([*range(size)], [[*range(size)], [], ["a", "b"]], [str(number) for number in range(size)]):
        given = copy.deepcopy(whole)
        pieces = [*list_pieces(given)]
        assert json.loads(b"".join(pieces)) == whole
        assert given == [] and max(map(len, pieces)) < 8 * AT_ONCE


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_client_that_leaves_during_a_long_body_is_reported(leaves: bool):
    """The status is 200, which the head said, as in a stream of events."""
    seen = list[tuple[int | None, str, bool]]()

    class Seen:
        def on_exchange(self, exchange: Exchange) -> None:
            seen.append((exchange.status, exchange.outcome, exchange.has_succeeded))

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"} if leaves else await asyncio.Future()

    scope = {"type": "http", "method": "POST", "path": "/generate", "headers": []}
    with WatchExchanges(EndpointTable([], object), [Seen()], Counter()).exchange(scope) as exchange:

        async def send(message: Any) -> None:
            exchange.note(message)
            await asyncio.sleep(0)

        pieces = iter([b"[", b"1" * (PIECE_BYTES + 1), b"]"])
        response = await respond_in_pieces(pieces, functools.partial(asyncio.sleep, 0))
        await response(scope, receive, send)
    assert seen == [(200, "client_disconnect" if leaves else "ok", not leaves)]


async def test_a_long_body_is_made_as_its_client_reads_it_and_not_for_one_that_has_left():
    made, num_turns = list[int](), 0
    piece = b"1" * PIECE_BYTES

    def pieces() -> Iterator[bytes]:
        for number in range(1000):
            made.append(number)
            yield piece

    left, read, sent = asyncio.Event(), asyncio.Semaphore(3), list[Any]()

    async def receive() -> dict[str, Any]:
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        await read.acquire()
        sent.append(message)

    async def turn() -> None:
        nonlocal num_turns
        num_turns += 1

    response = await respond_in_pieces(pieces(), turn)
    answering = asyncio.create_task(response({"type": "http", "headers": []}, receive, send))
    await turns(20)
    assert [message["type"] for message in sent] == ["http.response.start"] + ["http.response.body"] * 2
    assert len(made) == 6 and num_turns == 3, "two pieces are more than one turn sends; one send waits"
    left.set()
    await answering
    assert len(made) == 6
