"""The front's own values in `/metrics`, counted as requests pass.

An **answer** is one sequence that the engine makes; a request has `n` answers to each prompt. Each answer that begins
is counted once, when it ends: as finished or as aborted. `docs/observability.md` says what counts as a token.
"""

import collections
import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import final

import jsg
from jsg.server.observer import Begun
from jsg.server.telemetry.abort_reasons import ABORT_REASONS, ABORT_REQUEST, ERROR, end_reason
from jsg.server.telemetry.exchange import Exchange
from jsg.server.telemetry.series import Counter, Family, Histogram, Series
from jsg.speech.answers.answer import Answer, AnswerDelta, Prompt
from jsg.types import FinishType

RATE_WINDOW_S = 10.0  # the throughput is measured over this time

LATENCY_BOUNDS = (.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)  # fmt: skip
TOKEN_GAP_BOUNDS = (
    .0005, .001, .002, .003, .005, .0075, .01, .015, .02, .025, .03, .04, .05, .075, .1, .15, .2, .3, .5, 1, 2, 5, 10,
)  # fmt: skip
LAG_BOUNDS = (.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5)  # fmt: skip
LENGTH_BOUNDS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
)  # fmt: skip

ANSWERS_OPEN = Series("jsg:answers_open", "gauge", "The number of answers that have begun and not ended.")
THROUGHPUT = Series(
    "jsg:generation_throughput", "gauge", f"The generated tokens per second over the last {RATE_WINDOW_S:g} s."
)
BUILD_INFO = Series(
    "jsg:build_info", "gauge", "Always 1; the labels name the version and the model.", ("version", "model_name")
)
STATES = {
    "loading": "loading",
    "ok": "ready",
    "degraded": "ready",
    "shutting down": "draining",
    "stalled": "stalled",
    "dead": "ended",
}
"""What `/health` and `/ready` say → the state in which the server is then."""
STATE = Series(
    "jsg:state",
    "gauge",
    "1 for the state of the server and 0 for the others: it loads its model, is ready, drains before its end, or "
    "all its engines stall or have ended.",
    ("state",),
)
START_TIME = Series(
    "process_start_time_seconds", "gauge", "When the server was started, in seconds since 1970. It has its usual name."
)
FRONT_MEMORY = Series(
    "jsg:front_resident_memory_bytes", "gauge", "The resident memory of the processes of the front (Linux only)."
)
WORKERS_UP = Series(
    "jsg:workers_up", "gauge", "The number of worker processes that take connections (--front-processes above 1)."
)
GAUGES = frozenset({ANSWERS_OPEN.name, THROUGHPUT.name, FRONT_MEMORY.name})
"""What `Metrics.summable` has beside totals."""


@final
class TokenCounters:
    """Tokens of prompts and answers."""

    def __init__(self) -> None:
        self.prompt = Counter(
            "jsg:prompt_tokens_total",
            "The tokens of prompts. Each prompt counts once, when the engine begins to answer it.",
        )
        self.cached = Counter(
            "jsg:cached_tokens_total",
            "The prompt tokens that were found in the prefix cache. Each prompt counts once.",
        )
        self.generated = Counter("jsg:generation_tokens_total", "The tokens that were added to answers.")
        self.discarded = Counter(
            "jsg:generation_tokens_discarded_total",
            "The tokens of answers to requests that did not succeed, by the reason for the end.",
            ("reason",),
        )


@final
class RequestHistograms:
    """How many seconds answers took, and how many tokens they had."""

    def __init__(self) -> None:
        self.first_token = Histogram(
            "jsg:time_to_first_token_seconds",
            "The time from the request to the first token of an answer.",
            LATENCY_BOUNDS,
        )
        self.token_gap = Histogram(
            "jsg:inter_token_latency_seconds",
            "The time between two tokens of an answer, once for each token. Tokens that come together share the time.",
            TOKEN_GAP_BOUNDS,
        )
        self.end = Histogram(
            "jsg:e2e_request_latency_seconds",
            "The time from the request to the end of a finished answer.",
            LATENCY_BOUNDS,
        )
        self.queue = Histogram(
            "jsg:queue_time_seconds",
            "The time from the arrival of an answer's request at the engine to its first step.",
            LATENCY_BOUNDS,
        )
        self.prefill = Histogram(
            "jsg:prefill_time_seconds", "The time from the first step of an answer to its first token.", LATENCY_BOUNDS
        )
        self.decode = Histogram(
            "jsg:decode_time_seconds", "The time from the first token of a finished answer to its end.", LATENCY_BOUNDS
        )
        self.prompt_len = Histogram(
            "jsg:request_prompt_tokens", "The prompt tokens of a finished answer.", LENGTH_BOUNDS
        )
        self.output_len = Histogram(
            "jsg:request_generation_tokens", "The generated tokens of a finished answer.", LENGTH_BOUNDS
        )
        self.max_len = Histogram(
            "jsg:request_max_tokens", "The largest number of tokens that a finished answer might have.", LENGTH_BOUNDS
        )

    def finish(self, answer: Answer) -> None:
        """Counts a finished answer."""
        self.end.observe(answer.elapsed_s)
        if answer.first_token_s is not None:
            self.decode.observe(answer.elapsed_s - answer.first_token_s)
        self.prompt_len.observe(len(answer.request.input_ids))
        self.output_len.observe(len(answer.token_ids))
        self.max_len.observe(answer.request.sampling.max_new_tokens)


@final
@dataclasses.dataclass(slots=True, eq=False)
class _Progress:
    """What is known of an answer that has not ended.

    Attributes:
        uncounted: The prompt, until it is counted; the `n` answers to it share this list.
        last_token_s: When its last token came; None before the first.
    """

    uncounted: list[Prompt]
    last_token_s: float | None = None


@final
class Metrics:
    """Counts as an `Observer` and as an `ExchangeObserver`, on one event loop.

    Invariant: an answer is in `_open` from `on_start` until it is counted, once, as finished or aborted.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic, *, started_at: float | None = None) -> None:
        """Starts at zero. `started_at` is what `now` gave when the server was started; None for this moment."""
        self._started_s = time.time() - (0 if started_at is None else now() - started_at)
        self.tokens = TokenCounters()
        self.histograms = RequestHistograms()
        self.finished = Counter(
            "jsg:requests_finished_total",
            "The answers that finished, by the path of the request and the reason for the end.",
            ("route", "reason"),
        )
        self.aborted = Counter(
            "jsg:requests_aborted_total", "The answers that did not finish, by the reason for the end.", ("reason",)
        )
        self.http = Counter(
            "jsg:http_requests_total",
            "The responses, by path, method and status. 499 means that the client left before the response.",
            ("route", "method", "status"),
        )
        self.loop_lag = Histogram(
            "jsg:event_loop_lag_seconds", "The delay with which the front's event loop serves a timer.", LAG_BOUNDS
        )
        self._open: dict[Answer, _Progress] = {}
        self._now = now
        self._generated_at: collections.deque[tuple[float, float]] = collections.deque([(now(), 0.0)])
        for reason in ABORT_REASONS:  # a rate needs to have seen zero
            self.aborted.add(0, (reason,))
            self.tokens.discarded.add(0, (reason,))

    def expect(self, routes: Iterable[str]) -> None:
        """Shows zero for these routes, which generate, until there is more."""
        for route in routes:
            for finish in (FinishType.STOP, FinishType.LENGTH):
                self.finished.add(0, (route, finish.value))

    def on_start(self, begun: Begun) -> None:
        """Notes that the answers of a generation are open."""
        answers = iter(begun.answers)
        for prompt in begun.prompts:
            uncounted = [prompt]
            for answer in itertools.islice(answers, prompt.sampling.n):
                self._open[answer] = _Progress(uncounted)

    def on_delta(self, begun: Begun, answer: Answer, delta: AnswerDelta) -> None:
        """Counts the tokens of a delta, and the end of an answer."""
        progress = self._open.get(answer)
        if progress is None:
            return
        num_tokens = len(delta.token_ids)
        if num_tokens:
            if progress.last_token_s is None:
                self._count_first_token(answer, progress)
            else:
                self.histograms.token_gap.observe((answer.elapsed_s - progress.last_token_s) / num_tokens, num_tokens)
            progress.last_token_s = answer.elapsed_s
            self.tokens.generated.add(num_tokens)
        if delta.finish is not None:
            self._end(begun.route, answer, progress, delta.finish.type)

    def on_end(self, begun: Begun, error: BaseException | None) -> None:
        """Counts the answers that did not finish as aborted."""
        unfinished = [answer for answer in begun.answers if self._open.pop(answer, None) is not None]
        if unfinished:
            self.aborted.add(len(unfinished), (end_reason(begun.answers, error) or ERROR,))

    def on_exchange(self, exchange: Exchange) -> None:
        """Counts the response. Where it failed, counts its tokens as discarded."""
        self.http.add(1, (exchange.endpoint.route, exchange.method, str(exchange.status)))
        num_tokens = sum(len(answer.token_ids) for answer in exchange.answers)
        if num_tokens and not exchange.has_succeeded:
            self.tokens.discarded.add(num_tokens, (exchange.outcome,))

    def sample_rate(self) -> None:
        """Remembers how many tokens there were by now; called about once a second, for the throughput."""
        now = self._now()
        self._generated_at.append((now, self.tokens.generated.value()))
        while self._generated_at[1][0] <= now - RATE_WINDOW_S:
            self._generated_at.popleft()

    def series(self) -> list[Series]:
        """All series that this class counts."""
        others = (STATE, START_TIME, ANSWERS_OPEN, THROUGHPUT, BUILD_INFO, FRONT_MEMORY, WORKERS_UP)
        return [*(counted.series for counted in self._counted()), *others]

    def families(self, model_name: str, status: str) -> Iterator[Family]:
        """The families of the front, as they are scraped. `status` is what the probes say."""
        yield STATE.family({(state,): int(state == STATES[status]) for state in STATES.values()})
        yield START_TIME.family({(): self._started_s})
        yield BUILD_INFO.family({(jsg.__version__, model_name): 1})
        yield from self.summable()

    def summable(self) -> Iterator[Family]:
        """Those of which a server with several processes shows the sum."""
        for counted in self._counted():
            yield counted.family()
        yield ANSWERS_OPEN.family({(): len(self._open)})
        yield THROUGHPUT.family({(): self._throughput()})
        if (memory_bytes := _resident_bytes()) is not None:
            yield FRONT_MEMORY.family({(): memory_bytes})

    def _counted(self) -> list[Counter | Histogram]:
        tokens, histograms = vars(self.tokens).values(), vars(self.histograms).values()
        return [*tokens, *histograms, self.finished, self.aborted, self.http, self.loop_lag]

    def _throughput(self) -> float:
        then, before = self._generated_at[0]
        seconds = self._now() - then
        return (self.tokens.generated.value() - before) / seconds if seconds > 0 else 0.0

    def _count_first_token(self, answer: Answer, progress: _Progress) -> None:
        self._count_prompt(answer, progress)
        first_s = answer.elapsed_s
        self.histograms.first_token.observe(first_s)
        self.histograms.queue.observe(answer.queue_s)
        self.histograms.prefill.observe(max(first_s - answer.queue_s, 0.0))

    def _count_prompt(self, answer: Answer, progress: _Progress) -> None:
        if progress.uncounted:
            progress.uncounted.clear()
            self.tokens.prompt.add(len(answer.request.input_ids))
            self.tokens.cached.add(answer.cached_tokens)

    def _end(self, route: str, answer: Answer, progress: _Progress, finish: FinishType) -> None:
        del self._open[answer]
        match finish:
            case FinishType.STOP | FinishType.LENGTH:
                self._count_prompt(answer, progress)  # one that wants no tokens has had no first one
                self.finished.add(1, (route, finish.value))
                self.histograms.finish(answer)
            case FinishType.ABORT:
                self.aborted.add(1, (ABORT_REQUEST,))
            case FinishType.ERROR:
                self.aborted.add(1, (ERROR,))


def _resident_bytes() -> int | None:
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
