"""`RuntimeEndpoint` against a server whose answers are written down: what is sent, what fails, what is tried again."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any
from unittest.mock import AsyncMock

import certifi
import httpx
import pytest
from httpcore._backends.anyio import AnyIOBackend

import jsg as sgl
from jsg.errors import (
    BackendError,
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    ForbiddenError,
    GrammarError,
    JsgError,
    QueueFullError,
    RateLimitError,
    RequestError,
    ShuttingDownError,
    TimeLimitError,
)
from jsg.lang.http import client, model
from jsg.lang.http.endpoint import RuntimeEndpoint
from jsg.lang.streams.loop import shared_loop
from jsg.lang.tokens.model import Outcome, TokenCall, TokenDelta
from jsg.processing.parts import JoinedPart, MediaPart, OffsetPart, TextPart, TokenPart
from tests.lang.fake_server import LAST, TEMPLATE, FakeServer, Reply, answer, failure, fake_server

CALL = TokenCall(prompt=(TextPart("ab"),), sampling={"max_new_tokens": 4})
PARTS = (
    TextPart("plain"),
    TextPart("<s>raw", is_markup=True),
    TextPart("<s>user", is_markup=True, is_template=True),
    TokenPart((5, 6)),
    OffsetPart(7),
    MediaPart("image", b"png", "image/png"),
    MediaPart("video", b"mp4", "video/mp4", 3),
    MediaPart("video", (b"png", b"mp4"), "video/jpeg"),
    JoinedPart(((TextPart("x"),), (TokenPart((8,)), TextPart("y")))),
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(client, "FIRST_DELAY_S", 0.001)
    with fake_server() as server:
        yield server


def run(server: FakeServer, work: Any, **options: Any) -> Any:
    """Runs `work(endpoint)` on a loop of its own."""

    async def main() -> Any:
        endpoint = RuntimeEndpoint(server.url, **({"timeout_s": 30} | options))
        try:
            return await work(endpoint)
        finally:
            await endpoint.close()

    return asyncio.run(main())


async def deltas_of(endpoint: RuntimeEndpoint, call: TokenCall = CALL) -> list[TokenDelta]:
    return [delta async for delta in endpoint._model.generate(call)]


class TestGenerate:
    def test_parts_go_out_and_the_outcome_comes_back(self, server):
        events = [answer("a", finish=None), ": comment\n\n", answer("ab", finish="stop", prompt_tokens=9, **LAST)]
        server.replies["/generate"] = [Reply(events=events)]
        call = TokenCall(prompt=PARTS, sampling={"temperature": 0}, reports={"return_logprob": True})
        deltas = run(server, lambda e: deltas_of(e, call), cache_salt="salt", api_key="key")
        assert [delta.text for delta in deltas] == ["a", "b", ""]
        meta = {"finish_reason": {"type": "stop"}, "cached_tokens": 0, "prompt_tokens": 9}
        assert deltas[-1].outcome == Outcome(part_ids=((1, 2),), kept_ids=(3,), tail="", meta=meta)
        path, body, headers = server.calls[-1]
        assert path == "/generate"
        assert headers["Authorization"] == "Bearer key"
        assert body == {
            "prompt": [
                "plain",
                {"markup": "<s>raw"},
                {"template": "<s>user"},
                [5, 6],
                {"offset": 7},
                {"image": "cG5n", "media_type": "image/png"},
                {"video": "bXA0", "media_type": "video/mp4", "num_frames": 3},
                {"video": "cG5n,bXA0", "media_type": "video/jpeg"},
                {"branches": [["x"], [[8], "y"]]},
            ],
            "sampling_params": {"temperature": 0},
            "stream": True,
            "return_logprob": True,
            "cache_salt": "salt",
        }

    def test_of_several_answers_the_first_streams_and_the_others_come_with_the_end(self, server):
        events = [
            answer("c", 2),
            answer("x", 1, finish=None),
            answer("a", 0, finish=None),
            answer("ab", 0, **LAST),
            answer("xy", 1),
        ]
        server.replies["/generate"] = [Reply(events=events)]
        deltas = run(server, deltas_of)
        assert [delta.text for delta in deltas] == ["a", "b", ""]
        assert deltas[-1].outcome is not None and deltas[-1].outcome.others == ("xy", "c")

    def test_a_server_that_can_sends_only_what_is_new(self, server):
        events = [answer("a", 0, finish=None), answer("x", 1, finish=None), answer("b", 0, **LAST), answer("y", 1)]
        server.replies["/get_chat_template"] = [Reply(TEMPLATE | {"sends_increments": True})]
        server.replies["/generate"] = [Reply(events=events)]
        deltas = run(server, deltas_of)
        assert [delta.text for delta in deltas] == ["a", "b", ""]
        assert deltas[-1].outcome is not None and deltas[-1].outcome.others == ("xy",)
        assert server.bodies("/generate")[0]["incremental"] is True

    def test_text_that_is_cut_anywhere_arrives_whole(self, server):
        """One event in many chunks, and many events in one."""
        import json

        first, second = answer("é😀", finish=None), answer("é😀\u2028z", **LAST)
        data = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in (first, second)]
        server.replies["/generate"] = [Reply(events=[*data[0], data[1]]), Reply(events=["".join(data)])]

        async def both(endpoint):
            return await deltas_of(endpoint), await deltas_of(endpoint)

        for deltas in run(server, both):
            assert [delta.text for delta in deltas] == ["é😀", "\u2028z", ""]

    def test_closing_it_early_disconnects(self, server):
        reply = Reply(events=[answer("a", finish=None)], waits=True)
        server.replies["/generate"] = [reply]

        async def first_only(endpoint):
            async with contextlib.aclosing(endpoint._model.generate(CALL)) as deltas:
                return await anext(deltas)

        assert run(server, first_only) == TokenDelta("a")
        assert reply.is_left.wait(10)

    def test_a_connection_is_used_again(self, server):
        server.replies["/generate"] = [Reply(events=[answer("a", **LAST)])]

        async def twice(endpoint):
            await deltas_of(endpoint)
            await deltas_of(endpoint)

        accepted = []
        server.verify_request = lambda *args: accepted.append(args) is None
        run(server, twice)
        assert len(server.calls) == 3  # the template is asked for once
        assert len(accepted) == 1

    def test_calls_at_a_time_are_bounded(self, server, monkeypatch):
        monkeypatch.setattr(model, "MAX_CALLS", 1)
        reply = Reply(events=[answer("a", finish=None)], waits=True)
        server.replies["/generate"] = [reply, Reply(events=[answer("b", **LAST)])]

        async def two(endpoint):
            async with contextlib.aclosing(endpoint._model.generate(CALL)) as first:
                await anext(first)
                second = asyncio.create_task(deltas_of(endpoint))
                await endpoint.server_info()  # the loop has had its turn
                waiting = len(server.bodies("/generate"))
            return waiting, await second

        server.replies["/get_server_info"] = [Reply({})]
        waiting, deltas = run(server, two)
        assert (waiting, deltas[0].text) == (1, "b")


class TestFailures:
    @pytest.mark.parametrize(
        ("status", "fields", "kind"),
        [
            (400, {}, RequestError),
            (400, {"type": "GrammarError", "param": "regex"}, GrammarError),
            (400, {"type": "ContextLengthError"}, ContextLengthError),
            (400, {"type": "invalid_request_error", "code": "context_length_exceeded"}, ContextLengthError),
            (413, {}, RequestError),
            (401, {}, ForbiddenError),
            (403, {"type": "ForbiddenError"}, ForbiddenError),
            (429, {}, RateLimitError),
            (500, {}, BackendError),
            (503, {"type": "EngineDeadError"}, EngineDeadError),
            (503, {"type": "QueueFullError"}, QueueFullError),
            (503, {"type": "ShuttingDownError"}, ShuttingDownError),
            (504, {}, TimeLimitError),
        ],
    )
    def test_a_refusal_is_the_exception_it_is_in_process(self, server, status, fields, kind):
        server.replies["/generate"] = [failure(status, "the rule and what to do", **fields)]
        with pytest.raises(JsgError, match="the rule and what to do") as raised:
            run(server, deltas_of, max_retries=0)
        assert type(raised.value) is kind
        assert getattr(raised.value, "param", None) == fields.get("param")

    def test_what_fails_in_a_stream_is_raised_there(self, server):
        error = {"error": {"message": "no room", "type": "QueueFullError"}}
        server.replies["/generate"] = [Reply(events=[answer("a", finish=None), error])]
        with pytest.raises(QueueFullError, match="no room"):
            run(server, deltas_of)

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            ({"type": "invalid_request_error", "param": "graph"}, RequestError),
            ({"type": "invalid_request_error", "code": "context_length_exceeded"}, ContextLengthError),
            ({"type": "server_error"}, BackendError),
        ],
    )
    def test_streams_under_v1_fail_in_the_words_of_openai(self, server, error, kind):
        server.replies["/v1/programs"] = [Reply(events=[{"error": {"message": "the rule"} | error}])]
        with pytest.raises(kind, match="the rule") as raised:
            run(server, lambda e: anext(e.run_graph({}, {}, stream=True)))
        assert type(raised.value) is kind

    @pytest.mark.parametrize("how", [{"breaks": True}, {"is_done": False}])
    def test_an_answer_that_breaks_off_is_not_begun_again(self, server, how):
        server.replies["/generate"] = [Reply(events=[answer("a", finish=None)], **how)]
        with pytest.raises(BackendError, match="broke off"):
            run(server, deltas_of)
        assert len(server.bodies("/generate")) == 1

    @pytest.mark.parametrize("status", [429, 503])
    def test_a_busy_server_is_asked_again(self, server, status):
        busy = failure(status, "too many", headers={"Retry-After": "0"})
        server.replies["/generate"] = [busy, busy, Reply(events=[answer("a", **LAST)])]
        assert run(server, deltas_of)[0].text == "a"
        assert len(server.bodies("/generate")) == 3

    def test_it_gives_up_with_what_was_last_said(self, server):
        server.replies["/generate"] = [failure(503, "first", type="QueueFullError"), failure(503, "last")]
        with pytest.raises(BackendError, match="last"):
            run(server, deltas_of, max_retries=2)
        assert len(server.bodies("/generate")) == 3

    def test_a_dead_engine_is_not_asked_again(self, server):
        server.replies["/generate"] = [failure(503, "the engine ended", type="EngineDeadError")]
        with pytest.raises(EngineDeadError):
            run(server, deltas_of)
        assert len(server.bodies("/generate")) == 1

    def test_a_wrong_request_is_not_sent_again(self, server):
        server.replies["/generate"] = [failure(400, "wrong")]
        with pytest.raises(RequestError):
            run(server, deltas_of)
        assert len(server.bodies("/generate")) == 1

    def test_a_connection_that_ends_before_the_answer_is_made_again(self, server):
        server.replies["/select"] = [Reply(breaks=True), failure(400, "seen")]
        with pytest.raises(RequestError, match="seen"):
            run(server, lambda e: e._model.score((), ["a"]))

    def test_a_server_that_is_not_there_is_named(self, monkeypatch):
        monkeypatch.setattr(client, "FIRST_DELAY_S", 0.001)
        with socket.create_server(("127.0.0.1", 0)) as unused:
            port = unused.getsockname()[1]

        async def ask():
            await RuntimeEndpoint(f"http://127.0.0.1:{port}", max_retries=1).server_info()

        with pytest.raises(BackendError, match=rf"http://127.0.0.1:{port} must answer.*is it running"):
            asyncio.run(ask())

    def test_n5_a_connection_that_takes_too_long_is_tried_again(self, server, monkeypatch):
        server.replies["/get_server_info"] = [Reply({"version": "1"})]
        real = httpx.AsyncClient.send
        num_sent = 0

        async def send(client, request, **options):
            nonlocal num_sent
            num_sent += 1
            if num_sent == 1:
                raise httpx.ConnectTimeout("", request=request)
            return await real(client, request, **options)

        monkeypatch.setattr(httpx.AsyncClient, "send", send)
        assert run(server, lambda e: e.server_info()) == {"version": "1"}
        assert num_sent == 2

    def test_another_server_is_refused_by_what_it_lacks(self, server):
        del server.replies["/get_chat_template"]
        with pytest.raises(BackendError, match=r"must be a jsg server.*no /get_chat_template.*jsg.OpenAI"):
            run(server, deltas_of)
        with pytest.raises(BackendError, match=r"to run programs that are sent whole.*no /v1/programs"):
            run(server, lambda e: anext(e.run_graph({}, {})))

    @pytest.mark.parametrize("body", [b"<html>", {"text": "a"}, {"meta_info": 5}])
    def test_an_answer_of_another_form_is_named(self, server, body):
        server.replies["/select"] = [Reply(body)]
        with pytest.raises(BackendError, match="/select must answer"):
            run(server, lambda e: e._model.score((), ["a"]))

    @pytest.mark.parametrize(
        "events",
        [
            [],
            [5],
            [[1, 2]],
            ["data: {\n\n"],
            [{"index": 0}],
            [{"text": "a"}],
            [answer("a", **LAST) | {"index": "x"}],
            [answer("a", **LAST) | {"meta_info": 5}],
            [answer("a", 1, **LAST)],
            [answer("a", **LAST | {"part_ids": 5})],
            [{"error": "no object"}],
            [{"error": None}],
        ],
    )
    def test_n6_a_stream_of_another_form_is_the_servers_fault(self, server, events):
        server.replies["/generate"] = [Reply(events=events)]
        with pytest.raises(BackendError):
            run(server, deltas_of)

    @pytest.mark.parametrize("events", [[], [5], [{"text": "a"}], [answer("a", part_ids=5)], [{"error": 1}]])
    @pytest.mark.parametrize("max_holds", [0, 1])
    def test_n6_a_hold_of_another_form_is_the_servers_fault(self, server, monkeypatch, events, max_holds):
        monkeypatch.setattr(model, "MAX_HOLDS", max_holds)
        server.replies["/generate"] = [Reply(events=events)]
        with pytest.raises(BackendError):
            run(server, lambda e: e._model.hold((TextPart("a"),)))

    @pytest.mark.parametrize("template", [[], 5, {"chat_template": "x"}])
    def test_n6_a_template_of_another_form_is_the_servers_fault(self, server, template):
        server.replies["/get_chat_template"] = [Reply(template)]
        with pytest.raises(BackendError, match="/get_chat_template must answer"):
            run(server, lambda e: e._model.turns())

    def test_n6_a_wait_beyond_all_numbers_is_none(self, server):
        server.replies["/generate"] = [failure(503, "busy", headers={"Retry-After": "9" * 5000})]
        with pytest.raises(JsgError, match="busy"):
            run(server, deltas_of, max_retries=0)

    def test_silence_ends_a_call(self, server):
        server.replies["/generate"] = [Reply(events=[answer("a", finish=None)], waits=True)]
        with pytest.raises(BackendError, match=r"must not be silent for 0.2 s; raise timeout_s"):
            run(server, deltas_of, timeout_s=0.2)

    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"base_url": "localhost:30000"}, "must begin with http://"),
            ({"base_url": "http://"}, "must begin with http://"),
            ({"timeout_s": 0}, "timeout_s must be larger than 0"),
            ({"max_retries": -1}, "max_retries must be 0 or more"),
            ({"verify": "/no/such/file"}, "verify must be a file of certificates"),
            ({"verify": __file__}, "verify must be a file of certificates"),
        ],
    )
    def test_an_argument_that_cannot_work_is_refused(self, options, why):
        with pytest.raises(ConfigError, match=why):
            RuntimeEndpoint(**({"base_url": "http://localhost"} | options))

    def test_the_model_of_a_server_is_named_without_a_loop(self, server):
        server.replies["/get_model_info"] = [Reply({"model_path": "tiny"})] * 2
        server.replies["/get_server_info"] = [Reply({"tokenizer_path": "tiny"})]
        with RuntimeEndpoint(server.url) as endpoint:
            assert endpoint.get_model_name() == endpoint.model_info["model_path"] == "tiny"
            assert endpoint.get_server_info() == {"tokenizer_path": "tiny"}

    def test_speculation_for_remote_apis_is_a_hint_that_means_nothing(self):
        assert RuntimeEndpoint("http://localhost").open(num_api_spec_tokens=5)


class TestHolds:
    def test_it_is_open_until_it_is_released(self, server):
        reply = Reply(events=[answer("", finish=None, part_ids=[[4]]), ": hold\n\n"], waits=True)
        server.replies["/generate"] = [reply]

        async def hold(endpoint):
            held = await endpoint._model.hold((TextPart("a"),))
            assert not reply.is_left.is_set()
            await held.release()
            await held.release()
            return held.part_ids

        assert run(server, hold) == ((4,),)
        assert reply.is_left.wait(10)
        assert server.bodies("/generate") == [
            {"prompt": ["a"], "sampling_params": {"max_new_tokens": 0}, "stream": True, "hold": True}
        ]

    @pytest.mark.parametrize(("status", "kind"), [(429, "RateLimitError"), (503, "QueueFullError")])
    def test_where_there_are_too_many_the_prompt_is_only_computed(self, server, status, kind):
        computed = Reply(events=[answer("", part_ids=[[4]], kept_ids=[], tail="")])
        server.replies["/generate"] = [failure(status, "too many", type=kind), computed]

        async def hold(endpoint):
            held = await endpoint._model.hold((TextPart("a"),))
            await held.release()
            return held.part_ids

        assert run(server, hold) == ((4,),)
        assert [body.get("hold") for body in server.bodies("/generate")] == [True, None]

    def test_this_process_has_a_bound_of_its_own(self, server, monkeypatch):
        monkeypatch.setattr(model, "MAX_HOLDS", 1)
        held = Reply(events=[answer("", finish=None, part_ids=[[4]])], waits=True)
        computed = Reply(events=[answer("", part_ids=[[4]], kept_ids=[], tail="")])
        server.replies["/generate"] = [held, computed, held]

        async def three(endpoint):
            model = endpoint._model
            first = await model.hold((TextPart("a"),))
            second = await model.hold((TextPart("a"),))
            await first.release()
            third = await model.hold((TextPart("a"),))
            for each in (second, third):
                await each.release()

        run(server, three)
        assert [body.get("hold") for body in server.bodies("/generate")] == [True, None, True]

    def test_a_wrong_prompt_is_an_error(self, server):
        server.replies["/generate"] = [failure(400, "no such token")]
        with pytest.raises(RequestError, match="no such token"):
            run(server, lambda e: e._model.hold((TokenPart((10**9,)),)))


class TestTheRest:
    def test_programs_sent_whole(self, server):
        result = {"variables": {"a": "xy"}}
        events = [{"variable": "a", "delta": "x"}, {"variable": "a", "delta": "y"}, {"result": result}]
        server.replies["/v1/programs"] = [Reply(result), Reply(events=events)]

        async def both(endpoint):
            whole = [event async for event in endpoint.run_graph({"nodes": []}, {"q": 1})]
            return whole, [
                event
                async for event in endpoint.run_graph({"nodes": []}, {"q": 1}, stream=True, sampling_params={"seed": 1})
            ]

        assert run(server, both) == ([{"result": result}], events)
        assert server.bodies("/v1/programs")[1] == {
            "graph": {"nodes": []},
            "arguments": {"q": 1},
            "stream": True,
            "sampling_params": {"seed": 1},
        }

    def test_flush_cache_says_whether_it_did(self, server):
        server.replies["/flush_cache"] = [Reply({"success": True}), failure(400, "requests run")]

        async def twice(endpoint):
            return await endpoint.flush_cache(), await endpoint.flush_cache()

        assert run(server, twice) == (True, False)
        server.replies["/flush_cache"] = [Reply({"success": True}), failure(400, "requests run"), failure(403, "no")]
        with RuntimeEndpoint(server.url) as endpoint:
            assert (endpoint.flush_cache(), sgl.flush_cache(endpoint)) == (True, False)
            with pytest.raises(ForbiddenError):
                endpoint.flush_cache()

    def test_flush_cache_without_the_right_key_is_an_error(self, server):
        server.replies["/flush_cache"] = [failure(403, "this key may not")]
        with pytest.raises(ForbiddenError):
            run(server, lambda e: e.flush_cache())

    def test_each_loop_has_connections_of_its_own(self, server):
        server.replies["/get_server_info"] = [Reply({"version": "1"})]
        endpoint = RuntimeEndpoint(server.url)

        async def ask():
            try:
                return await endpoint.server_info()
            finally:
                await endpoint.close()
                await endpoint.close()

        assert [asyncio.run(ask()) for _ in range(2)] == [{"version": "1"}] * 2

    def test_s9_it_closes_what_programs_opened(self, server):
        server.replies["/get_server_info"] = [Reply({})]

        def client_of(endpoint: RuntimeEndpoint):
            return endpoint._http._clients._things[shared_loop().loop][1]

        with RuntimeEndpoint(server.url) as endpoint:
            clients = []
            for _ in range(2):
                shared_loop().submit(endpoint.server_info()).result(30)
                clients.append(client_of(endpoint))
                if len(clients) == 1:
                    asyncio.run(endpoint.close())  # on another loop than that of programs
                    assert clients[0].is_closed
        assert clients[1].is_closed and clients[0] is not clients[1]

    def test_it_closes_a_connection_that_was_being_opened(self, server, monkeypatch):
        server.replies["/get_server_info"] = [Reply({})]
        connect, opened = AnyIOBackend.connect_tcp, []

        async def work(endpoint: RuntimeEndpoint) -> None:
            is_connecting, may_connect = asyncio.Event(), asyncio.Event()

            async def held(*args: Any, **options: Any) -> Any:
                is_connecting.set()
                await may_connect.wait()
                opened.append(await connect(*args, **options))
                return opened[-1]

            monkeypatch.setattr(AnyIOBackend, "connect_tcp", held)
            asking = asyncio.create_task(endpoint.server_info())
            await is_connecting.wait()
            await endpoint.close()
            may_connect.set()
            assert await asking == {}

        run(server, work)
        assert [stream.get_extra_info("socket").fileno() for stream in opened] == [-1]

    @pytest.mark.parametrize("when", ["while the request breaks", "behind a busy answer", "during the pause"])
    def test_a_call_is_not_tried_again_once_the_endpoint_is_closed(self, server, monkeypatch, when):
        clients = []

        async def work(endpoint: RuntimeEndpoint) -> None:
            async def send(client: httpx.AsyncClient, *args: Any, **options: Any) -> Any:
                clients.append(client)
                if when == "during the pause":
                    closing.append(asyncio.create_task(endpoint.close()))
                    raise httpx.ConnectError("")
                await endpoint.close()
                if when == "while the request breaks":
                    raise httpx.ReadError("")
                return httpx.Response(503, content=b"{}", extensions={"network_stream": AsyncMock()})

            closing: list[asyncio.Task[None]] = []
            monkeypatch.setattr(httpx.AsyncClient, "send", send)
            with pytest.raises(BackendError, match="endpoint was closed while a call was under way"):
                await endpoint.server_info()

        run(server, work)
        assert len(clients) == 1

    def test_n4_a_file_of_certificates_is_taken(self, server):
        server.replies["/get_server_info"] = [Reply({})]
        assert run(server, lambda e: e.server_info(), verify=certifi.where()) == {}

    def test_scores_that_cannot_be_are_minus_infinity(self, server):
        choice = {"token_ids": [1], "token_texts": ["a"], "logprobs": [None], "unconditional": [None]}
        server.replies["/select"] = [
            Reply({"part_ids": [], "common_ids": [], "choices": [choice], "meta_info": {"prompt_tokens": 1}})
        ]
        scored = run(server, lambda e: e._model.score((TextPart("p"),), ["a"], unconditional=True))
        assert scored.choices[0].logprobs == (float("-inf"),)
        assert server.bodies("/select") == [{"prompt": ["p"], "choices": ["a"], "unconditional": True}]


class TestEvents:
    @pytest.mark.parametrize("size", [1, 2, 3, 5, 1000])
    def test_s8_events_are_the_same_however_they_are_cut(self, size):
        stream = b"a\n\nb\nc\n\n\n\n\nd\n\n\ne\n\nrest"
        splitter = client.EventSplitter()
        events = [e for at in range(0, len(stream), size) for e in splitter.push(stream[at : at + size])]
        assert events == stream.split(b"\n\n")[:-1]

    def test_s8_a_large_event_is_read_in_time_that_grows_with_it(self):
        """What is looked through is counted, not timed: each chunk once, and each byte joined once."""
        looked_at = 0

        class Chunk(bytes):
            def __radd__(self, before):
                nonlocal looked_at
                looked_at += len(before) + len(self)
                return before + bytes(self)

        splitter = client.EventSplitter()
        for _ in range(100):
            assert splitter.push(Chunk(b"x" * 1000)) == []
        assert splitter.push(Chunk(b"\n\n")) == [b"x" * 100_000]
        assert looked_at <= 101 * 1001
