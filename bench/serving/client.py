"""Sends one request and records what the client sees of its answer."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import msgspec

from bench.serving.dialects import Ask, Dialect, Prompt, Reading
from bench.serving.sse import DONE, EventDecoder

Clock = Callable[[], float]
KEEPALIVE_S = 4  # below uvicorn's 5 s, so that no request is sent on a connection that the server is closing
MAX_QUOTE = 200


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A server, and how to send requests to it."""

    base_url: str
    dialect: Dialect
    ask: Ask
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def url(self) -> str:
        """The URL for requests. The base URL may end with `/v1`, as in SDKs."""
        return root_of(self.base_url) + self.dialect.path


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """What the client saw of one request. Times are seconds on the clock of the run.

    Attributes:
        group: The prefix that it shared, for the report.
        due_s: When it should have been sent. A delay after that is the client's fault and not the server's.
        sent_s: The moment just before it was sent.
        ended_s: When its stream or body had ended.
        arrivals: (time, tokens so far or None) of each event with tokens.
        asked_tokens: The most tokens that it asked for.
        approximate_prompt_len: The length of the prompt by the workload, for servers that report no usage.
        error: Kind of failure, such as `http_503`; None if it is complete.
        message: The server's message about the failure.
        has_done: Whether the stream ended with [DONE].
    """

    group: int
    due_s: float
    sent_s: float
    ended_s: float = 0.0
    arrivals: list[tuple[float, int | None]] = dataclasses.field(default_factory=list)
    asked_tokens: int = 0
    approximate_prompt_len: int = 0
    reading: Reading = dataclasses.field(default_factory=Reading)
    error: str | None = None
    message: str = ""
    has_done: bool = False


def root_of(base_url: str) -> str:
    """The base URL without a `/v1` at its end."""
    return base_url.rstrip("/").removesuffix("/v1")


def open_session(timeout_s: float | None) -> aiohttp.ClientSession:
    """An HTTP session with as many connections as there are requests."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=timeout_s))


async def send(
    session: aiohttp.ClientSession,
    target: Target,
    said: Sequence[Prompt],
    max_tokens: int,
    outcome: Outcome,
    clock: Clock = time.perf_counter,
) -> None:
    """Asks for the answer to the conversation so far, and fills the outcome, also with whatever goes wrong."""
    body = msgspec.json.encode(target.dialect.body(target.ask, said, max_tokens))
    headers = {"Content-Type": "application/json", **target.headers}
    outcome.asked_tokens = max_tokens
    outcome.sent_s = clock()
    try:
        async with session.post(target.url, data=body, headers=headers) as response:
            if response.status != 200:
                outcome.error = f"http_{response.status}"
                outcome.message = (await response.text(errors="replace"))[:MAX_QUOTE]
            elif target.ask.stream:
                await _read_stream(response, target.dialect, outcome, clock)
            else:
                _read_event(await response.read(), target.dialect, outcome)
    except (TimeoutError, aiohttp.ServerTimeoutError):
        outcome.error = "timeout"
    except aiohttp.ClientConnectorError as failure:
        outcome.error, outcome.message = "connect", str(failure)[:MAX_QUOTE]
    except aiohttp.ClientError as failure:
        outcome.error, outcome.message = "disconnect", str(failure)[:MAX_QUOTE]
    except BadEventError as failure:
        outcome.error, outcome.message = "bad_event", str(failure)[:MAX_QUOTE]
    outcome.ended_s = clock()
    if outcome.error is None:
        _judge(outcome)


class BadEventError(Exception):
    """An event that is not a JSON object."""


async def _read_stream(response: aiohttp.ClientResponse, dialect: Dialect, outcome: Outcome, clock: Clock) -> None:
    """Records the time of each event, which is when its last byte was read from the socket."""
    decoder = EventDecoder()
    async for chunk in response.content.iter_any():
        now = clock()
        for data in decoder.feed(chunk):
            _read_event(data, dialect, outcome, now)
    for data in decoder.finish():
        _read_event(data, dialect, outcome, clock())


def _read_event(data: bytes, dialect: Dialect, outcome: Outcome, now: float | None = None) -> None:
    if data.strip() == DONE:
        outcome.has_done = True
        return
    try:
        event: Any = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        event = None
    if not isinstance(event, dict):
        raise BadEventError(data.decode(errors="replace"))
    before = outcome.reading.num_tokens
    if dialect.read(event, outcome.reading) and now is not None:
        said = outcome.reading.num_tokens
        outcome.arrivals.append((now, said if said != before else None))


def _judge(outcome: Outcome) -> None:
    """Sets the error of an answer that is not complete. A complete one has a finish reason, or ended with [DONE]."""
    reading = outcome.reading
    if reading.error is not None:
        outcome.error, outcome.message = "error_event", reading.error[:MAX_QUOTE]
    elif reading.finish in ("abort", "error"):
        outcome.error, outcome.message = "aborted", f"finish reason {reading.finish}"
    elif reading.finish is None and not outcome.has_done:
        outcome.error, outcome.message = "truncated", "the answer ended without a finish reason and without [DONE]"


async def get_json(session: aiohttp.ClientSession, base_url: str, path: str, headers: Mapping[str, str]) -> Any:
    """The JSON at this path; None if there is none."""
    try:
        async with session.get(root_of(base_url) + path, headers=headers) as response:
            return msgspec.json.decode(await response.read()) if response.status == 200 else None
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
        return None


async def sleep_until(due_s: float, clock: Clock) -> None:
    """Waits until a time on the clock. Returns at once if it has passed."""
    await asyncio.sleep(max(0.0, due_s - clock()))
