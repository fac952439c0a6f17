"""`traceparent`, and the spans that a collector gets."""

import builtins
import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from jsg.errors import ConfigError
from jsg.server.telemetry.exchange import Endpoint, Exchange
from jsg.server.telemetry.trace_context import TraceContext
from jsg.server.telemetry.tracing import EXPORT_TIMEOUT_S, SpanExport, span_attributes
from tests.engine.fake_core import FAILING_TOKEN
from tests.server.mixed_run import quiet
from tests.server.running import ProcessMaker, RunningServer, events_of
from tests.server.scrape import scrape_until
from tests.server.threads import ServerMaker

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01"
NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-00"
DEADLINE_S = 15
MAX_END_S = 15.0  # half of what the SDK takes by itself


class Collector:
    """Takes OTLP over HTTP on a free port; with `hangs` it takes connections and answers nothing."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.released = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if hangs:
                    collector.released.wait()
                    return
                request = ExportTraceServiceRequest.FromString(body)
                collector.paths.append(self.path)
                for group in request.resource_spans:
                    collector.resources.append(attributes_of(group.resource))
                    collector.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def span(self, request_id: str) -> Span:
        """The one span of that request, once it is here."""
        deadline = time.monotonic() + DEADLINE_S
        while not (found := [s for s in self.spans if attributes_of(s)["jsg.request_id"] == request_id]):
            assert time.monotonic() < deadline, f"no span of {request_id}"
            time.sleep(0.02)
        assert len(found) == 1
        return found[0]


def attributes_of(message: Any) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        if kind == "array_value":
            return [value_of(item) for item in value.array_value.values]
        return getattr(value, kind)

    return {item.key: value_of(item.value) for item in message.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def traced(make_server: ServerMaker, collector: Collector) -> Iterator[RunningServer]:
    knobs = {"otlp_traces_endpoint": f"{collector.address}/v1/traces", "served_model_name": "my-model"}
    with make_server(server=knobs) as server:
        yield server


def post(server: RunningServer, path: str, body: dict, request_id: str, **headers: str):
    return server.http.post(path, json=body, headers={"x-request-id": request_id, **headers})


class TestSpans:
    def test_a_completion(self, traced: RunningServer, collector: Collector):
        body = {"prompt": "hello", "max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 5, "n": 2}
        before = time.time_ns()
        answer = post(traced, "/v1/completions", body, "whole").json()
        after = time.time_ns()
        span = collector.span("whole")
        assert (span.name, span.kind) == ("text_completion my-model", Span.SPAN_KIND_SERVER)
        assert before - 10**7 < span.start_time_unix_nano < span.end_time_unix_nano < after + 10**7
        assert (span.parent_span_id, span.status.code) == (b"", Status.STATUS_CODE_UNSET)
        attributes = attributes_of(span)
        times = {name: attributes.pop(name) for name in ("jsg.queue_s", "jsg.time_to_first_token_s")}
        assert times["jsg.queue_s"] == 0.25
        assert 0 < times["jsg.time_to_first_token_s"] < (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert attributes == {
            "http.request.method": "POST",
            "http.route": "/v1/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "jsg",
            "gen_ai.system": "jsg",
            "gen_ai.request.model": "my-model",
            "gen_ai.request.stream": False,
            "gen_ai.request.choice.count": 2,
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 0.9,
            "gen_ai.request.top_k": 7,
            "gen_ai.request.seed": 5,
            "gen_ai.request.frequency_penalty": 0.0,
            "gen_ai.request.presence_penalty": 0.0,
            "gen_ai.response.id": answer["id"],
            "gen_ai.response.model": "my-model",
            "gen_ai.response.finish_reasons": ["length", "length"],
            "gen_ai.usage.input_tokens": answer["usage"]["prompt_tokens"],
            "gen_ai.usage.output_tokens": answer["usage"]["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": 0,
            "jsg.cached_tokens": 0,
            "jsg.request_id": "whole",
        }
        [event] = span.events
        assert event.name == "first token"
        assert span.start_time_unix_nano < event.time_unix_nano < span.end_time_unix_nano

    def test_a_chat_that_streams(self, traced: RunningServer, collector: Collector):
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
        events = events_of(post(traced, "/v1/chat/completions", body, "streamed"))
        span = collector.span("streamed")
        attributes = attributes_of(span)
        assert span.name == "chat my-model"
        assert attributes["gen_ai.response.id"] == events[0]["id"]
        assert attributes["gen_ai.request.stream"] is True
        assert attributes["gen_ai.response.time_to_first_chunk"] > 0

    def test_what_runs_is_named(self, traced: RunningServer, collector: Collector):
        post(traced, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}, "named")
        collector.span("named")
        assert {resource["service.name"] for resource in collector.resources} == {"jsg"}
        assert set(collector.paths) == {"/v1/traces"}

    def test_a_seed_of_64_bits(self, traced: RunningServer, collector: Collector):
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1, "sampling_seed": 2**64 - 1}}
        post(traced, "/generate", body, "seed")
        assert attributes_of(collector.span("seed"))["gen_ai.request.seed"] == -1

    def test_the_parent_is_the_caller(self, traced: RunningServer, collector: Collector):
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        post(traced, "/generate", body, "child", traceparent=SAMPLED, tracestate="vendor=1,other=2")
        span = collector.span("child")
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
        assert span.trace_state == "vendor=1,other=2"

    def test_a_caller_that_does_not_sample_is_obeyed(self, traced: RunningServer, collector: Collector):
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        post(traced, "/generate", body, "unsampled", traceparent=NOT_SAMPLED)
        post(traced, "/generate", body, "sampled", traceparent=SAMPLED)
        collector.span("sampled")
        assert "unsampled" not in [attributes_of(span)["jsg.request_id"] for span in collector.spans]

    @pytest.mark.parametrize("parent", [SAMPLED.upper(), "nonsense", f"{SAMPLED}-00", "é" * 55])
    def test_an_invalid_parent_is_none(self, traced: RunningServer, collector: Collector, parent: str):
        name = f"invalid-{len(parent)}-{parent[0].isascii()}-{parent[-1]!r}".replace("'", "").encode("ascii", "replace")
        body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
        headers = {"x-request-id": name.decode().replace("?", "x"), "traceparent": parent.encode()}
        assert traced.http.post("/generate", json=body, headers=headers).status_code == 200
        span = collector.span(headers["x-request-id"])
        assert span.parent_span_id == b"" and span.trace_id.hex() != TRACE_ID

    def test_a_failing_row_is_an_error(self, traced: RunningServer, collector: Collector):
        assert post(traced, "/generate", {"input_ids": [FAILING_TOKEN]}, "failed").status_code == 500
        span = collector.span("failed")
        assert span.status.code == Status.STATUS_CODE_ERROR
        assert attributes_of(span)["error.type"] == "error"

    def test_what_is_refused_in_a_stream_is_no_error_200(self):
        scope = {"method": "POST", "headers": []}
        exchange = Exchange(Endpoint("/generate", generates=True), scope, {"request_id": "late"})
        exchange.status, exchange.failure = 200, "refused"  # one prompt of a list, while others were answered
        assert span_attributes(exchange, "m")["error.type"] == "refused"

    def test_a_bad_request_is_none_of_the_server(self, traced: RunningServer, collector: Collector):
        post(traced, "/generate", {"nonsense": 1}, "bad")
        span = collector.span("bad")
        attributes = attributes_of(span)
        assert (span.status.code, attributes["error.type"]) == (Status.STATUS_CODE_UNSET, "400")
        assert "gen_ai.usage.input_tokens" not in attributes

    def test_a_client_that_leaves(self, traced: RunningServer, collector: Collector):
        body = {"text": "abc", "stream": True, "sampling_params": {"max_new_tokens": 900}}
        with traced.http.stream("POST", "/generate", json=body, headers={"x-request-id": "left"}) as response:
            next(response.iter_lines())
        attributes = attributes_of(collector.span("left"))
        assert attributes["error.type"] == "client_disconnect"
        assert attributes["gen_ai.response.finish_reasons"] == ["unfinished"]

    def test_what_generates_nothing_has_no_span(self, traced: RunningServer, collector: Collector):
        for path in ("/health", "/metrics", "/v1/models"):
            traced.http.get(path)
        post(traced, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}, "last")
        collector.span("last")
        assert {attributes_of(span)["http.request.method"] for span in collector.spans} == {"POST"}

    def test_nothing_that_a_client_wrote_is_in_a_span(self, traced: RunningServer, collector: Collector):
        body = {
            "text": "Wednesday-prompt",
            "cache_salt": "salt-and-pepper",
            "sampling_params": {"max_new_tokens": 20, "stop": ["stop-here"]},
        }
        post(traced, "/generate", body, "secret", Authorization="Bearer some-key")
        post(traced, "/generate", {"text": ["Wednesday-prompt", 7]}, "secret-bad")
        for request_id in ("secret", "secret-bad"):
            text = str(collector.span(request_id))
            for secret in ("Wednesday", "pepper", "stop-here", "some-key"):
                assert secret not in text


def test_the_end_sends_what_waits_and_a_path_is_added(make_server: ServerMaker):
    with Collector() as collector, make_server(server={"otlp_traces_endpoint": collector.address}) as server:
        for i in range(20):
            post(server, "/generate", {"text": "a", "sampling_params": {"max_new_tokens": 1}}, f"r{i}")
        server.terminate()
        assert server.join() is None
        assert len(collector.spans) == 20 and set(collector.paths) == {"/v1/traces"}


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True])
def test_a_collector_that_is_away_or_hangs_harms_nobody(make_process: ProcessMaker, capfd, hangs: bool):
    with contextlib.ExitStack() as stack:
        collector = stack.enter_context(Collector(hangs=hangs))
        if not hangs:
            stack.close()  # nobody listens on its port any more
        with make_process(server={"otlp_traces_endpoint": collector.address}) as server:
            deadline = time.monotonic() + 1.5  # longer than the time between two exports
            while time.monotonic() < deadline:
                body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
                started = time.monotonic()
                assert server.http.post("/generate", json=body).status_code == 200
                assert time.monotonic() - started < EXPORT_TIMEOUT_S
            scrape_until(server.http, quiet)
            server.process.terminate()
            started = time.monotonic()
            assert server.end()[0] == 0
            assert time.monotonic() - started < MAX_END_S
            assert "Traceback" not in capfd.readouterr().err


class TestEndpoint:
    @pytest.mark.parametrize("endpoint", ["", "localhost:4318", "ftp://host/v1/traces", "http://", "http://host:99999"])
    def test_what_is_no_url_is_refused(self, endpoint: str):
        with pytest.raises(ConfigError, match="--otlp-traces-endpoint must be the http or https URL"):
            SpanExport.open(endpoint, "m")

    def test_without_the_packages_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch):
        for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
            monkeypatch.delitem(sys.modules, name)
        real_import = builtins.__import__

        def refuse(name: str, *arguments: Any, **named: Any) -> Any:
            if name.startswith("opentelemetry"):
                raise ImportError(name)
            return real_import(name, *arguments, **named)

        monkeypatch.setattr(builtins, "__import__", refuse)
        with pytest.raises(ConfigError, match="run: pip install opentelemetry-sdk opentelemetry-exporter"):
            SpanExport.open("http://127.0.0.1:1", "m")

    def test_the_server_ends_with_the_error(self, make_server: ServerMaker):
        with make_server(server={"otlp_traces_endpoint": "nowhere"}, wait=False) as server:
            error = server.join()
        assert isinstance(error, ConfigError) and "--otlp-traces-endpoint" in str(error)


class TestTraceparent:
    """The rules of the W3C recommendation, level 1."""

    def parse(self, *values: str, state: str | None = None) -> TraceContext | None:
        headers = [(b"traceparent", value.encode("latin-1")) for value in values]
        return TraceContext.parse(headers + ([] if state is None else [(b"tracestate", state.encode())]))

    def test_the_example_of_the_recommendation(self):
        assert self.parse(SAMPLED) == TraceContext(TRACE_ID, PARENT_ID, is_sampled=True)
        assert self.parse(NOT_SAMPLED) == TraceContext(TRACE_ID, PARENT_ID, is_sampled=False)

    def test_other_flags_are_ignored(self):
        for flags, is_sampled in (("03", True), ("ff", True), ("02", False), ("fe", False)):
            parsed = self.parse(f"00-{TRACE_ID}-{PARENT_ID}-{flags}")
            assert parsed is not None and parsed.is_sampled is is_sampled

    def test_a_later_version_may_be_longer(self):
        for value in (f"01-{TRACE_ID}-{PARENT_ID}-01", f"cc-{TRACE_ID}-{PARENT_ID}-01-what-is-to-come"):
            assert self.parse(value) == TraceContext(TRACE_ID, PARENT_ID, is_sampled=True)

    @pytest.mark.parametrize(
        "value",
        [
            "",
            "00",
            f"ff-{TRACE_ID}-{PARENT_ID}-01",
            f"0-{TRACE_ID}-{PARENT_ID}-01",
            f"00-{TRACE_ID}-{PARENT_ID}-1",
            f"00-{TRACE_ID}-{PARENT_ID}",
            f"00-{TRACE_ID}-{PARENT_ID}-01-",
            f"00-{TRACE_ID}-{PARENT_ID}-01-extra",
            f"01-{TRACE_ID}-{PARENT_ID}-01extra",
            f"00-{'0' * 32}-{PARENT_ID}-01",
            f"00-{TRACE_ID}-{'0' * 16}-01",
            f"00-{TRACE_ID.upper()}-{PARENT_ID}-01",
            f"00-{TRACE_ID[:-1]}g-{PARENT_ID}-01",
            f"00-{TRACE_ID}-{PARENT_ID}-0x",
            f"00_{TRACE_ID}_{PARENT_ID}_01",
            f"00-{TRACE_ID}{PARENT_ID}-01",
            f"\u0660\u0660-{TRACE_ID}-{PARENT_ID}-01".encode().decode("latin-1"),
        ],
    )
    def test_what_is_invalid_is_nothing(self, value: str):
        assert self.parse(value) is None

    def test_none_and_two_are_nothing(self):
        assert self.parse() is None and self.parse(SAMPLED, SAMPLED) is None

    def test_the_state_is_carried_up_to_its_limit(self):
        kept = self.parse(SAMPLED, state="a=1")
        assert kept is not None and kept.state == "a=1"
        dropped = self.parse(SAMPLED, state="a=" + "1" * 600)
        assert dropped is not None and dropped.state == ""
