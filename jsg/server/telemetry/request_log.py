"""`--log-requests`: one line on stderr for each HTTP request that generates or is refused, when it ends.

A line has names, counts and times. Of what the client wrote it has only `user` and names of fields, and of the answers
nothing. The fields are described in `docs/observability.md`.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import queue
import select
import sys
import threading
from typing import Any, final

import msgspec

from jsg.engine.child.log_relay import utc
from jsg.server.caller import Caller
from jsg.server.telemetry.exchange import Exchange
from jsg.server.telemetry.quotes import name_or_cut, without_quotes
from jsg.waits import by_name

MAX_WAITING_LINES = 10_000
MAX_NAME_CHARS = 256  # of `user`, which the client chooses
CLOSE_TIMEOUT_S = 2.0
SOURCE = "requests"  # where other lines have the name of a process


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One request.

    Attributes:
        time: The end of the request, as RFC 3339 in UTC.
        level: INFO; WARNING if the request did not succeed, and ERROR if the server is at fault.
        source: Always "requests".
        request_id: The name of the request in headers and traces.
        method, route: The method and the path of the request.
        status: The status of the response; 499 if the client left before the response.
        outcome: "ok", "refused", or the reason why answers were aborted.
        code, param, message: The error that the client got, in its answer or in its stream: a code, the faulty field
            and the message, in which "…" stands for what the client had written.
        model: The name of the model that is served.
        stream: Whether the response was a stream of events.
        user: The end user whom the client named.
        key: The name of the API key; null where there is none.
        tenant: A digest of the API key, which does not reveal the key; empty on a server without keys or with one.
        num_answers: The number of answers that were begun.
        finish_reasons: The finish reason of each answer; null if the answer did not finish.
        prompt_tokens, completion_tokens, cached_tokens: The counts of `usage`, in which a prompt counts once.
        queue_s: The longest time, in seconds, that an answer waited for its first step.
        waited: For what that answer or another one waited longest, before it was sent to the engine too: the seconds
            by reason.
        ttft_s: The seconds to the first token of any answer.
        e2e_s: The seconds from the request to the end of the response.
        trace_id: The id of the trace of the request, if it has one.
    """

    time: str
    level: str
    source: str
    request_id: str | None
    method: str
    route: str
    status: int | None
    outcome: str
    code: str | None
    param: str | None
    message: str | None
    model: str
    stream: bool
    user: str | None
    key: str | None
    tenant: str
    num_answers: int
    finish_reasons: tuple[str | None, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float | None
    waited: dict[str, float]
    ttft_s: float | None
    e2e_s: float
    trace_id: str | None

    @classmethod
    def of(cls, exchange: Exchange, model: str = "") -> "LogLine":
        """Describes a request to this model that has ended."""
        answers = exchange.answers
        ended_s = exchange.started_ns / 1e9 + exchange.ended_at - exchange.started_at
        caller = exchange.state.get("caller", Caller())
        refusal = exchange.refusal
        status, outcome, told = exchange.status, exchange.outcome, 0 if refusal is None else refusal.status
        if refusal is not None and status is not None and status >= 400:  # the connection may have sent the refusal
            status = refusal.status
        return cls(
            time=utc(ended_s),
            level="INFO" if outcome == "ok" else "ERROR" if max(status or 0, told) >= 500 else "WARNING",
            source=SOURCE,
            request_id=exchange.state.get("request_id"),
            method=exchange.method,
            route=exchange.endpoint.route,
            status=status,
            outcome=outcome,
            code=None if refusal is None else refusal.code,
            param=None if refusal is None else name_or_cut(refusal.param),
            message=None if refusal is None else without_quotes(refusal.message),
            model=model,
            stream=exchange.is_stream,
            user=None if exchange.user is None else exchange.user[:MAX_NAME_CHARS],
            key=caller.key,
            tenant=caller.tenant,
            num_answers=len(answers),
            finish_reasons=tuple(None if a.finish is None else a.finish.type.value for a in answers),
            prompt_tokens=sum(len(answer.request.input_ids) for answer in exchange.first_answers),
            completion_tokens=sum(len(answer.token_ids) for answer in answers),
            cached_tokens=sum(answer.cached_tokens for answer in exchange.first_answers),
            queue_s=_rounded(max((answer.queue_s for answer in answers), default=None)),
            waited=by_name(exchange.waited),
            ttft_s=_rounded(exchange.first_token_s),
            e2e_s=round(exchange.ended_at - exchange.started_at, 6),
            trace_id=exchange.trace_id,
        )


@final
class RequestLog:
    """An `ExchangeObserver` that writes lines from its own thread: a slow reader of stderr delays no request.

    When `MAX_WAITING_LINES` wait, further lines are dropped; the next line comes after one that says how many were.
    """

    def __init__(self, log_format: str = "json", model: str = "", fd: int | None = None) -> None:
        """Starts the thread; writes to this open file, stderr by default. Lines have the name of the model."""
        self._is_json, self._model = log_format == "json", model
        # Not through `sys.stderr`: a write that waits would hold its lock and block the interpreter's end.
        self._fd = sys.stderr.fileno() if fd is None else fd
        self._lines: queue.Queue[bytes | None] = queue.Queue(MAX_WAITING_LINES)
        self._num_dropped = 0
        self._thread = threading.Thread(target=self._write, name="jsg-request-log", daemon=True)
        self._thread.start()

    def on_exchange(self, exchange: Exchange) -> None:
        """Puts the line of a request into the queue, if the request generates or was refused."""
        if not exchange.endpoint.generates and exchange.refusal is None:
            return
        fields = msgspec.to_builtins(LogLine.of(exchange, self._model))
        line = b""
        if self._num_dropped:
            dropped = {"level": "WARNING", "source": SOURCE, "num_dropped_lines": self._num_dropped}
            line = self._line({"time": fields["time"]} | dropped)
        line += self._line(fields)
        try:
            self._lines.put_nowait(line)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def _line(self, fields: dict[str, Any]) -> bytes:
        """A line of these fields, in ASCII, so that nothing that a client has chosen ends the line."""
        if self._is_json:
            return json.dumps(fields).encode() + b"\n"
        head = " ".join(fields.pop(name) for name in ("time", "level", "source"))
        shown = (f"{name}={json.dumps(value)}" for name, value in fields.items() if value not in (None, "", [], {}))
        return f"{head}: {' '.join(shown)}\n".encode()

    async def close(self) -> None:
        """Writes the lines that wait, for `CLOSE_TIMEOUT_S` at most."""
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # nobody reads any more
            while (rest := self._lines.get()) is not None:
                while rest:
                    try:
                        rest = rest[os.write(self._fd, rest) :]
                    except BlockingIOError:  # another process that shares stderr made it non-blocking
                        select.select([], [self._fd], [])


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
