"""`--otlp-traces-endpoint`: one OpenTelemetry span for each HTTP request that generates, when it ends.

Attributes follow the semantic conventions for generative AI; `docs/observability.md` lists them. They have names,
numbers and times, and nothing that a client wrote: no prompt, no answer, no stop string.
"""

import asyncio
import contextlib
import threading
import urllib.parse
from typing import Any, Self, final

import jsg
from jsg.errors import ConfigError
from jsg.extras import install_command
from jsg.server.telemetry.abort_reasons import ABORT_REQUEST, CLIENT_DISCONNECT, REFUSED
from jsg.server.telemetry.exchange import Exchange
from jsg.server.telemetry.trace_context import TraceContext

PROVIDER = "jsg"
DEFAULT_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5.0
EXPORT_PERIOD_S = 1.0
MAX_WAITING_SPANS = 8192
MAX_BATCH_SPANS = 128  # encoding a larger batch would delay the event loop
CLOSE_TIMEOUT_S = 2.0
CHAT_ROUTES = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


@final
class SpanExport:
    """An `ExchangeObserver` that sends spans to a collector, from a thread of the OpenTelemetry SDK.

    A collector that is slow or away costs spans, never requests.
    """

    def __init__(self, provider: Any, model_name: str) -> None:
        """Makes spans with a `TracerProvider` of the OpenTelemetry SDK, which may not be installed."""
        self._provider = provider
        self._tracer = provider.get_tracer("jsg", jsg.__version__)
        self._model_name = model_name

    @classmethod
    def open(cls, endpoint: str, model_name: str) -> Self:
        """Exports to this URL and to nowhere else.

        Raises:
            ConfigError: It is no URL, or the packages of the extra `otel` are missing.
        """
        url = _checked_url(endpoint)
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
        except ImportError:
            raise ConfigError(
                "--otlp-traces-endpoint needs packages of OpenTelemetry, which are not installed; run: "
                f"{install_command('otel')}"
            ) from None
        provider = TracerProvider(
            sampler=ParentBased(ALWAYS_ON),
            resource=Resource({"service.name": "jsg", "service.version": jsg.__version__}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(
            BatchSpanProcessor(
                OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S),
                max_queue_size=MAX_WAITING_SPANS,
                schedule_delay_millis=EXPORT_PERIOD_S * 1000,
                max_export_batch_size=MAX_BATCH_SPANS,
            )
        )
        return cls(provider, model_name)

    def on_exchange(self, exchange: Exchange) -> None:
        """Makes the span of a request, if the request generates."""
        from opentelemetry.trace import SpanKind, Status, StatusCode

        if not exchange.endpoint.generates:
            return
        attributes = span_attributes(exchange, self._model_name)
        span = self._tracer.start_span(
            f"{attributes['gen_ai.operation.name']} {self._model_name}",
            context=_parent(exchange.trace),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=exchange.started_ns,
        )
        exchange.trace_id = f"{span.get_span_context().trace_id:032x}"
        ended_ns = exchange.started_ns + round((exchange.ended_at - exchange.started_at) * 1e9)
        if exchange.first_token_s is not None:
            span.add_event("first token", timestamp=exchange.started_ns + round(exchange.first_token_s * 1e9))
        if _is_fault(exchange):
            span.set_status(Status(StatusCode.ERROR))
        span.end(ended_ns)

    async def close(self) -> None:
        """Sends the spans that wait, for `CLOSE_TIMEOUT_S` at most."""
        loop = asyncio.get_running_loop()
        sent = asyncio.Event()

        def shut_down() -> None:
            self._provider.shutdown()
            with contextlib.suppress(RuntimeError):  # the loop has ended, so nobody waits
                loop.call_soon_threadsafe(sent.set)

        # Not `asyncio.to_thread`: the end of the loop would wait for it.
        threading.Thread(target=shut_down, name="jsg-span-export-end", daemon=True).start()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await sent.wait()


def span_attributes(exchange: Exchange, model_name: str) -> dict[str, Any]:
    """The attributes of the span of a request."""
    attributes: dict[str, Any] = {
        "http.request.method": exchange.method,
        "http.route": exchange.endpoint.route,
        "http.response.status_code": exchange.status,
        "gen_ai.operation.name": "chat" if exchange.endpoint.route in CHAT_ROUTES else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.system": PROVIDER,  # the older name of `gen_ai.provider.name`
        "gen_ai.request.model": model_name,
        "gen_ai.request.stream": exchange.is_stream,
        "jsg.request_id": exchange.state.get("request_id"),
    }
    if exchange.outcome != "ok":
        has_said_so = exchange.outcome == REFUSED and (exchange.status or 0) >= 400  # a stream's 200 says nothing
        attributes["error.type"] = str(exchange.status) if has_said_so else exchange.outcome
    if exchange.answers:
        attributes |= _request_attributes(exchange) | _response_attributes(exchange, model_name)
    return {name: value for name, value in attributes.items() if value is not None}


def _request_attributes(exchange: Exchange) -> dict[str, Any]:
    sampling = exchange.prompts[0].sampling
    return {
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.request.max_tokens": sampling.max_new_tokens,
        "gen_ai.request.temperature": float(sampling.temperature),
        "gen_ai.request.top_p": float(sampling.top_p),
        "gen_ai.request.top_k": None if sampling.top_k == -1 else sampling.top_k,
        "gen_ai.request.frequency_penalty": float(sampling.frequency_penalty),
        "gen_ai.request.presence_penalty": float(sampling.presence_penalty),
        "gen_ai.request.seed": None if sampling.sampling_seed is None else _int64(sampling.sampling_seed),
    }


def _response_attributes(exchange: Exchange, model_name: str) -> dict[str, Any]:
    answers, firsts = exchange.answers, exchange.first_answers
    cached_tokens = sum(answer.cached_tokens for answer in firsts)
    return {
        "gen_ai.response.id": exchange.prompts[0].rid if len(exchange.prompts) == 1 else None,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": [
            "unfinished" if answer.finish is None else answer.finish.type.value for answer in answers
        ],
        "gen_ai.response.time_to_first_chunk": exchange.first_token_s if exchange.is_stream else None,
        "gen_ai.usage.input_tokens": sum(len(prompt.input_ids) for prompt in exchange.prompts),
        "gen_ai.usage.output_tokens": sum(len(answer.token_ids) for answer in answers),
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        "jsg.cached_tokens": cached_tokens,
        "jsg.queue_s": max(answer.queue_s for answer in answers),
        "jsg.time_to_first_token_s": exchange.first_token_s,
    }


def _is_fault(exchange: Exchange) -> bool:
    """Whether the server is to blame that there is no whole answer."""
    is_failure = exchange.status is not None and exchange.status >= 500
    return is_failure or exchange.outcome not in ("ok", REFUSED, CLIENT_DISCONNECT, ABORT_REQUEST)


def _parent(trace: TraceContext | None) -> Any:
    """The context of a span that belongs to this trace; without a trace, of a span that begins one."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, TraceState, set_span_in_context

    if trace is None:
        return Context()
    parent = SpanContext(
        trace_id=int(trace.trace_id, 16),
        span_id=int(trace.parent_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if trace.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([trace.state]) if trace.state else None,
    )
    return set_span_in_context(NonRecordingSpan(parent), Context())


def _int64(seed: int) -> int:
    """The seed as the signed number that an attribute can hold."""
    return seed - 2**64 if seed >= 2**63 else seed


def _checked_url(endpoint: str) -> str:
    """The whole URL. A URL without a path gets the usual path of collectors. Raises ConfigError for what is no URL."""
    try:
        parts = urllib.parse.urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, is_url = urllib.parse.urlsplit(""), False
    if not is_url:
        raise ConfigError(
            "--otlp-traces-endpoint must be the http or https URL of a collector, such as "
            f"http://localhost:4318{DEFAULT_PATH}, but got {endpoint!r}"
        )
    return endpoint if parts.path not in ("", "/") else parts._replace(path=DEFAULT_PATH).geturl()
