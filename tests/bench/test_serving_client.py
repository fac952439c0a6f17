"""The load generator's client against servers that play recorded dialects; delays are steps of a shared clock."""

import asyncio
import json

import pytest

from bench.serving.client import Outcome, Target, open_session, send
from bench.serving.dialects import DIALECTS, Ask
from bench.serving.sse import EventDecoder
from bench.serving.statistics import latencies, output_tokens, tokens_of_events
from tests.bench.scripted import Cut, Script, SharedClock, scripted_server


def event(body: dict | str, *, prefix: str = "data: ", end: str = "\n\n") -> bytes:
    return (prefix + (body if isinstance(body, str) else json.dumps(body)) + end).encode()


def chunk(text: str | None = None, finish: str | None = None, **fields) -> dict:
    """An event of `/v1/completions`."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], **fields}


def delta(finish: str | None = None, **fields) -> dict:
    """An event of `/v1/chat/completions`."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def usage(prompt: int, completion: int, **details) -> dict:
    shown = {"prompt_tokens": prompt, "completion_tokens": completion}
    return shown | ({"prompt_tokens_details": details} if details else {})


def ask(api: str, script: Script, *, status: int = 200, said: tuple = ("hello",), **knobs) -> tuple[Outcome, dict]:
    """The client's outcome for a script, and the body that it sent."""
    dialect = DIALECTS[api]

    async def run() -> tuple[Outcome, dict]:
        clock = SharedClock()
        outcome = Outcome(group=0, due_s=0.0, sent_s=0.0)
        async with scripted_server({dialect.path: script}, clock, status) as (url, server), open_session(20) as http:
            target = Target(base_url=url, dialect=dialect, ask=Ask(model="m", **knobs))
            await send(http, target, said, 7, outcome, clock)
        return outcome, server.bodies[0]

    return asyncio.run(run())


def test_vllm_completions():
    outcome, body = ask(
        "openai-completions",
        [
            *(0.25, event(chunk("one"))),
            *(0.125, event(chunk(" two"))),
            *(0.5, event(chunk(" three", "length"))),
            event({"choices": [], "usage": usage(11, 3, cached_tokens=4)}),
            *(1.0, event("[DONE]")),
        ],
    )
    assert outcome.error is None and outcome.has_done
    assert outcome.reading.text == "one two three" and outcome.reading.finish == "length"
    assert (outcome.reading.prompt_tokens, output_tokens(outcome), outcome.reading.cached_tokens) == (11, 3, 4)
    seen = latencies(outcome)
    assert (seen.ttft, seen.event_gaps, seen.token_gaps) == (250, [125, 500], [125, 500])
    assert (seen.tpot, seen.e2e, seen.is_estimated) == (312.5, 1875, False)
    assert body == {
        "model": "m",
        "prompt": "hello",
        "max_tokens": 7,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_openai_chat_begins_with_a_role_which_is_no_token():
    outcome, body = ask(
        "openai-chat",
        [
            *(0.25, event(delta(role="assistant", content="", refusal=None))),
            *(0.25, event(delta(content="Paris"))),
            *(0.25, event(delta(content=" it is"))),
            event(delta("stop")),
            event({"choices": [], "usage": usage(9, 5)}),
            event("[DONE]"),
        ],
        said=("hello", "yes?", "where?"),
    )
    assert outcome.error is None
    seen = latencies(outcome)
    assert (seen.ttft, seen.event_gaps, output_tokens(outcome)) == (500, [250], 5)
    assert seen.token_gaps == [62.5] * 4 and seen.is_estimated, "five tokens in two events: only the mean is known"
    assert body["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "where?"},
    ]


def test_usage_in_every_event_tells_the_tokens_of_each():
    outcome, body = ask(
        "openai-completions",
        [
            *(0.25, event(chunk("ab", usage=usage(3, 2)))),
            *(0.25, event(chunk("", usage=usage(3, 3)))),  # a token that is half a character
            *(0.75, event(chunk("cdé", usage=usage(3, 6)))),
            event(chunk("", "length", usage=usage(3, 6))),
            event({"choices": [], "usage": usage(3, 6)}),
            event("[DONE]"),
        ],
        continuous_usage=True,
    )
    assert tokens_of_events(outcome) == [2, 1, 3]
    seen = latencies(outcome)
    assert (seen.token_gaps, seen.tpot, seen.is_estimated) == ([250, 250, 250, 250], 250, False)
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


def test_usage_beside_the_finish_reason_is_no_token():
    outcome, _ = ask("openai-completions", [event(chunk("a")), event(chunk("", "stop", usage=usage(3, 2)))])
    assert outcome.error is None and not outcome.has_done
    assert len(outcome.arrivals) == 1 and output_tokens(outcome) == 2


def test_sglang_native_events_hold_the_whole_answer():
    def native(text: str, count: int, finish: dict | None = None) -> dict:
        meta = {"prompt_tokens": 5, "completion_tokens": count, "cached_tokens": 2, "finish_reason": finish}
        return {"text": text, "output_ids": list(range(count)), "meta_info": meta}

    outcome, body = ask(
        "native",
        [
            *(0.5, event(native("a", 1))),
            *(0.25, event(native("a b", 3))),
            event(native("a b c", 4, {"type": "length", "length": 4})),
            event("[DONE]"),
        ],
        said=((1, 2, 3), (7, 8), (9,)),
        ignore_eos=True,
    )
    assert (outcome.error, outcome.reading.text, outcome.reading.finish) == (None, "a b c", "length")
    assert outcome.reading.token_ids == (0, 1, 2, 3) and outcome.reading.cached_tokens == 2
    seen = latencies(outcome)
    assert (seen.ttft, seen.token_gaps) == (500, [125, 125, 0])
    assert body["input_ids"] == [1, 2, 3, 7, 8, 9]
    assert body["sampling_params"] == {"max_new_tokens": 7, "temperature": 0.0, "ignore_eos": True}


def test_transformers_serve_sends_no_done_and_null_fields():
    outcome, _ = ask(
        "openai-chat",
        [
            event(delta(role="assistant", content=None, tool_calls=None)),
            event(delta(content="a")),
            event({**delta("stop", content=None, role=None), "usage": None}),
        ],
    )
    assert outcome.error is None and outcome.reading.text == "a" and not outcome.has_done
    assert output_tokens(outcome) == 1, "without usage the events are counted"


def test_reasoning_and_tool_calls_are_tokens_too():
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    outcome, _ = ask(
        "openai-chat",
        [
            *(0.25, event(delta(reasoning_content="hm"))),
            event(delta(tool_calls=[call])),
            event(delta("tool_calls")),
            event("[DONE]"),
        ],
    )
    assert latencies(outcome).ttft == 250 and len(outcome.arrivals) == 2


def test_a_whole_answer_has_no_first_token():
    body = chunk("one two", "stop", usage=usage(4, 2, cached_tokens=1))
    outcome, sent = ask("openai-completions", [0.5, json.dumps(body).encode()], stream=False)
    assert (outcome.error, outcome.reading.text, output_tokens(outcome)) == (None, "one two", 2)
    assert latencies(outcome).ttft is None
    assert "stream" not in sent and "stream_options" not in sent


FINISHED = event(chunk("a", "stop"))


@pytest.mark.parametrize(
    ("script", "status", "kind", "message"),
    [
        (
            [event(chunk("a")), event({"error": {"message": "the engine ended"}})],
            200,
            "error_event",
            "the engine ended",
        ),
        ([event({"object": "error", "message": "too long"})], 200, "error_event", "too long"),
        ([event({"error": "plain"})], 200, "error_event", "plain"),
        ([event(chunk("a"))], 200, "truncated", "without a finish reason"),
        ([event(chunk("a")), Cut], 200, "disconnect", ""),
        ([event("{not JSON"), FINISHED], 200, "bad_event", "{not JSON"),
        ([event("[1]")], 200, "bad_event", "[1]"),
        ([b'data: {"text": "\xff"}\n\n', FINISHED], 200, "bad_event", '{"text": '),
        ([b"no UTF-8: \xff"], 502, "http_502", "no UTF-8"),
        ([event(chunk("a", "abort")), event("[DONE]")], 200, "aborted", "abort"),
        ([b'{"error": {"message": "the queue is full"}}'], 503, "http_503", "the queue is full"),
    ],
)
def test_what_goes_wrong_has_a_kind(script, status, kind, message):
    outcome, _ = ask("openai-completions", script, status=status)
    assert outcome.error == kind and message in outcome.message


async def test_nobody_listens():
    outcome = Outcome(group=0, due_s=0.0, sent_s=0.0)
    async with scripted_server({}, SharedClock()) as (url, _):
        pass
    async with open_session(5) as http:
        await send(http, Target(base_url=url, dialect=DIALECTS["native"], ask=Ask(model="m")), ("a",), 1, outcome)
    assert (outcome).error == "connect"


async def test_a_server_that_never_ends_is_a_timeout():
    outcome = Outcome(group=0, due_s=0.0, sent_s=0.0)
    closing = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await closing.wait()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with open_session(0.05) as http:
        await send(http, Target(base_url=url, dialect=DIALECTS["native"], ask=Ask(model="m")), ("a",), 1, outcome)
    closing.set()
    server.close()
    await server.wait_closed()
    assert (outcome).error == "timeout"


@pytest.mark.parametrize("base", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_base_url_may_end_with_v1(base):
    target = Target(base_url=base, dialect=DIALECTS["openai-chat"], ask=Ask(model="m"))
    assert target.url == "http://h:1/v1/chat/completions"
    assert Target(base_url=base, dialect=DIALECTS["native"], ask=Ask(model="m")).url == "http://h:1/generate"


STREAM = (
    b"\xef\xbb\xbf: a comment\r\n\r\nevent: x\r\ndata:no blank\r\n\r\nid: 1\rdata: lone CR\r\r"
    b"data: two\r\ndata:  lines\nretry: 5\n\ndata\n\ndata: last without an end"
)
DATA = [b"no blank", b"lone CR", b"two\n lines", b"last without an end"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, len(STREAM)])
def test_events_do_not_depend_on_how_the_bytes_are_cut(size):
    decoder = EventDecoder()
    found = [data for place in range(0, len(STREAM), size) for data in decoder.feed(STREAM[place : place + size])]
    assert found + decoder.finish() == DATA
    assert decoder.finish() == []
