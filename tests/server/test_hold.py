"""Prefixes that are held: `hold` of `/generate`, what limits it, and who ends it."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse

import pytest
from starlette.requests import Request

from jsg.server.http.event_stream import COMMENT, respond_with_events
from tests.server.running import RunningServer, check_discreet
from tests.server.scrape import scrape, scrape_until
from tests.server.threads import ServerMaker

TEXT = "a prefix that is held"
HOLD = {"text": TEXT, "hold": True, "stream": True}
KEYS = {"api_key": ("k1", "k2"), "max_requests_per_key": 2}


class Stream:
    """The events of an answer, one at a time."""

    def __init__(self, connection: HTTPConnection) -> None:
        self.response: HTTPResponse = connection.getresponse()

    def next(self) -> dict | str:
        """The next event; a comment, and the end, as text."""
        while not (line := self.response.readline().decode().strip()):
            if self.response.isclosed():
                return "closed"
        data = line.removeprefix("data: ")
        return json.loads(data) if line.startswith("data: {") else data


@contextlib.contextmanager
def holding(server: RunningServer, body: dict = HOLD, headers: dict[str, str] | None = None) -> Iterator[Stream]:
    with contextlib.closing(server.send("/generate", body, headers)) as connection:
        yield Stream(connection)


def test_a_hold_says_when_it_is_cached_and_ends_when_its_client_leaves(server: RunningServer):
    before = server.stats()["num_aborted"]
    with holding(server) as stream:
        first = stream.next()
        assert isinstance(first, dict)
        assert first["text"] == "" and first["meta_info"]["finish_reason"] is None
        assert first["meta_info"]["prompt_tokens"] == len(TEXT)
        server.wait_for_stats(num_holds=1)
        answer = server.http.post("/generate", json={"text": TEXT, "sampling_params": {"max_new_tokens": 1}}).json()
        assert answer["meta_info"]["cached_tokens"] == len(TEXT) - 1
    server.wait_for_stats(num_holds=0, num_aborted=before)  # released, which is the normal end


def test_a_flush_ends_holds_politely(server: RunningServer):
    with holding(server) as stream:
        stream.next()
        server.wait_for_stats(num_holds=1)
        server.http.post("/flush_cache").raise_for_status()
        last = stream.next()
        assert isinstance(last, dict) and last["meta_info"]["finish_reason"] == {"type": "stop"}
        assert stream.next() == "[DONE]"


def test_a_hold_ends_by_its_name(server: RunningServer):
    with holding(server, HOLD | {"rid": "held"}) as stream:
        stream.next()
        server.http.post("/abort_request", json={"rid": "held"}).raise_for_status()
        last = stream.next()
        assert isinstance(last, dict) and last["meta_info"]["finish_reason"]["type"] == "abort"
        assert stream.next() == "[DONE]"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"stream": False}, "stream"),
        ({"stream": None}, "stream"),
        ({"sampling_params": {"max_new_tokens": 1}}, "max_new_tokens"),
        ({"sampling_params": {"max_new_tokens": False}}, "max_new_tokens"),
        ({"sampling_params": {"n": 2}}, "n must be 1"),
        ({"sampling_params": [{}]}, "hold"),
        ({"sampling_params": {"regex": "a+"}}, "regex"),
        ({"sampling_params": {"temperature": 0.0}}, "temperature"),
        ({"sampling_params": {"max_new_tokens": 0, "stop": ["a"]}}, "stop"),
        ({"text": ["a", "b"]}, "hold"),
        ({"return_logprob": True}, "return_logprob"),
    ],
)
def test_what_a_hold_cannot_be(server: RunningServer, change: dict, field: str):
    response = server.http.post("/generate", json=HOLD | change)
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]
    check_discreet(response.text)


def test_a_request_that_holds_nothing_is_as_before(server: RunningServer):
    body = {"text": TEXT, "hold": False, "sampling_params": {"max_new_tokens": 2}}
    assert server.http.post("/generate", json=body).json()["text"] == TEXT[:2]


def test_a_hold_lasts_no_longer_than_it_may(make_server: ServerMaker):
    with make_server(server={"hold_timeout": 0.05}) as server, holding(server) as stream:
        stream.next()
        last = stream.next()
        assert isinstance(last, dict) and last["meta_info"]["finish_reason"] == {"type": "stop"}
        assert stream.next() == "[DONE]"
        server.wait_for_stats(num_holds=0)


def test_time_limits_of_requests_do_not_end_a_hold(make_server: ServerMaker):
    knobs = {"first_token_timeout": 0.2, "request_timeout": 0.3}
    with make_server(server=knobs) as server, holding(server) as stream:
        stream.next()
        server.wait_for_stats(num_holds=1)
        slow = {"text": TEXT, "sampling_params": {"max_new_tokens": 1000}}
        assert server.http.post("/generate", json=slow).status_code == 504  # it began later, and its time is over
        assert server.stats()["num_holds"] == 1
        server.http.post("/flush_cache").raise_for_status()
        last = stream.next()
        assert isinstance(last, dict) and last["meta_info"]["finish_reason"] == {"type": "stop"}


def test_holds_of_a_key_are_bounded_and_take_no_room_of_its_answers(make_server: ServerMaker):
    first, second = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))
    with make_server(server=KEYS) as server, contextlib.ExitStack() as held:
        for number in range(2):
            held.enter_context(holding(server, HOLD | {"text": f"{number} held"}, first)).next()
        refused = server.http.post("/generate", json=HOLD, headers=first)
        assert refused.status_code == 429 and "--max-requests-per-key" in refused.json()["error"]["message"]
        held.enter_context(holding(server, HOLD, second)).next()
        body = {"text": ["a", "b"], "sampling_params": {"max_new_tokens": 1}}
        assert server.http.post("/generate", json=body, headers=first).status_code == 200
        server.wait_for_stats(first, num_holds=3)
    # All have left: there is room again.


def test_a_server_that_ends_waits_for_no_hold(make_server: ServerMaker):
    with make_server(server={"shutdown_timeout": 600}) as server, holding(server) as stream:
        stream.next()
        server.terminate()
        last = stream.next()
        assert isinstance(last, dict) and last["meta_info"]["finish_reason"] == {"type": "stop"}
        started = time.monotonic()
        assert server.join() is None
        assert time.monotonic() - started < 60, "it gets no more time than requests under way would"


def test_a_hold_is_counted_as_an_answer_that_finished_when_it_was_cached(make_server: ServerMaker):
    with make_server() as server:
        with holding(server) as stream:
            stream.next()
            seen = scrape(server.http)
            assert seen.get("jsg:answers_open") == 0
            assert seen.get("jsg:requests_finished_total", route="/generate", reason="stop") == 1
            assert seen.get("jsg:prompt_tokens_total") == len(TEXT)
        server.wait_for_stats(num_holds=0)
        seen = scrape_until(server.http, lambda s: "/generate" in s.by("jsg:http_requests_total", "route"))
        assert seen.by("jsg:requests_aborted_total", "reason") == {}
        assert seen.get("jsg:e2e_request_latency_seconds_count") == 1


async def test_comments_keep_the_connection_alive():
    sent: list[bytes] = []
    is_enough = asyncio.Event()

    async def events():
        yield {"first": 1}
        await is_enough.wait()
        yield {"last": 2}

    async def receive():
        await asyncio.Event().wait()

    async def send(message):
        sent.append(message.get("body", b""))
        if sent.count(COMMENT) == 3:
            is_enough.set()

    scope = {"type": "http", "path": "/generate", "headers": []}
    response = respond_with_events(Request(scope, receive), events(), beat_s=0.001)
    await response(scope, receive, send)
    assert COMMENT.startswith(b":") and COMMENT.endswith(b"\n\n")
    told = [body for body in sent if body not in (b"", COMMENT)]
    assert told == [b'data: {"first":1}\n\n', b'data: {"last":2}\n\n', b"data: [DONE]\n\n"]
    assert sent[-1] == told[-1]  # and nothing behind it
