"""Measures the HTTP front: beside the engine alone, under 64 streams, with an engine that costs nothing, and scraped.

    python -m bench.front [--only ttft,streams,null,arrivals,scrape,tools,requests] [--seconds 60] [--output FILE]

ttft     time to first token over HTTP and in process, in turns on one idle machine, with the embedded model
streams  many concurrent streams of the embedded model: whether every token arrives, how late the event loop is, and the
         memory of both processes
null     how many tokens per second the front streams on one core, with an engine that computes nothing
arrivals how many requests of one token a second the front answers on one core, with the same engine
scrape   processor time of the front for each scrape of `/metrics`, with the embedded model and the names of vLLM
tools    processor time of the front for a chat with 20 tools, with an engine that computes nothing
requests processor time of the front for a stream of one token, by the length of its prompt, with the same engine
"""

import argparse
import asyncio
import contextlib
import gc
import http.client
import itertools
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import jsg
from bench.null_engine import words_of
from bench.report import Report
from bench.served import Served, served
from bench.serving.client import Outcome, Target, open_session
from bench.serving.dialects import DIALECTS, Ask
from bench.serving.load import Plan, Run, run_load
from bench.serving.statistics import output_tokens, percentile
from bench.serving.workloads import WORKLOADS, Shape, Writer
from jsg.processing.tokenizer import load_tokenizer
from jsg.sources import resolve_model

PARTS = ("ttft", "streams", "null", "arrivals", "scrape", "tools", "requests")
TINY_VOCAB = 1400
WARM_UP = 20
PROBE_PERIOD_S = 0.05
STREAM_APIS = ("openai-completions", "native")
LAG_METRIC = "jsg:event_loop_lag_seconds"
NULL_STREAMS = (64, 128, 256)
NULL_RATES = (4000, 8000, 12_000, 16_000, 24_000, 32_000)
ONE_EVENT = 0.98  # events for each token: fewer means that the front puts several into one
FRONT_CORE, OTHER_CORE = 0, 1
NUM_TOOLS, REQUESTS = 20, 100
JSON_HEADERS = {"Content-Type": "application/json"}
SCRAPE_PERIOD_S = 0.05  # of an endpoint picker
FIRST_REQUESTS_S = 3.0  # for what a new server still does after it is ready
SCRAPERS = (
    ("/health, one client", "/health", 1, {}),
    ("/metrics, one scraper", "/metrics", 1, {}),
    ("/metrics, four scrapers", "/metrics", 4, {}),
    ("/metrics, each anew", "/metrics", 1, {"Cache-Control": "no-cache"}),
)


# What HTTP adds to the first token of an idle server.


def measure_ttft(report: Report, rounds: int) -> None:
    """Measures the same prompts over HTTP and in this process, in turns. All are new to both engines."""
    sampling = {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}
    with served(["serve", "--port", "0"]) as server, jsg.Engine("tiny") as engine, _connected(server.url) as connection:
        ids = iter(WORKLOADS["random"](Shape(unique_len=32), Writer(vocab_size=TINY_VOCAB), 0))
        texts = iter(WORKLOADS["random"](Shape(unique_len=32), Writer(), 1))
        sides: dict[str, Callable[[], float]] = {
            "ids, in process": lambda: _engine_ttft_s(engine, input_ids=list(next_ids), sampling_params=sampling),
            "ids, /generate": lambda: _http_ttft_s(
                connection, "/generate", {"input_ids": next_ids, "sampling_params": sampling}
            ),
            "text, in process": lambda: _engine_ttft_s(engine, prompt=next_text, sampling_params=sampling),
            "text, /v1/completions": lambda: _http_ttft_s(
                connection,
                "/v1/completions",
                {"model": "tiny", "prompt": next_text, "max_tokens": 4, "temperature": 0, "ignore_eos": True},
            ),
        }
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(rounds + WARM_UP):
            next_ids, next_text = next(ids).turns[0].text, next(texts).turns[0].text
            for name, measure in sides.items():
                seconds = measure()
                if number >= WARM_UP:
                    samples[name].append(1e3 * seconds)
    for name, values in samples.items():
        report.add(f"TTFT idle, {name}", "ms", values, p99=percentile(values, 99))
    for kind, path in (("ids", "/generate"), ("text", "/v1/completions")):
        over, inside = samples[f"{kind}, {path}"], samples[f"{kind}, in process"]
        added = statistics.median(over) - statistics.median(inside)
        report.add(f"TTFT idle, {path} above in process (medians)", "ms", [added], target="<= 5")


def _engine_ttft_s(engine: jsg.Engine, **asked: Any) -> float:
    started = time.perf_counter()
    stream = engine.generate(stream=True, **asked)
    next(stream)
    seconds = time.perf_counter() - started
    for _ in stream:
        pass
    return seconds


def _http_ttft_s(connection: http.client.HTTPConnection, path: str, body: dict) -> float:
    encoded = json.dumps(body | {"stream": True}).encode()
    started = time.perf_counter()
    connection.request("POST", path, encoded, JSON_HEADERS)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    line = response.readline()
    seconds = time.perf_counter() - started
    assert line.startswith(b"data: {"), line
    response.read()
    return seconds


@contextlib.contextmanager
def _connected(url: str) -> Iterator[http.client.HTTPConnection]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    try:
        yield connection
    finally:
        connection.close()


# Many streams on the embedded model.


def measure_streams(report: Report, api: str, num_streams: int, seconds: float) -> None:
    """Measures a closed loop of streams, while a second process keeps asking for `/health`."""
    shape = Shape(unique_len=32, output_len=128)
    arguments = ["serve", "--port", "0", "--max-running-requests", str(num_streams)]
    with served(arguments) as server:
        target = Target(base_url=server.url, dialect=DIALECTS[api], ask=Ask(model="tiny", ignore_eos=True))
        writer = Writer(vocab_size=TINY_VOCAB)
        _load(target, shape, writer, Plan(concurrency=num_streams, num_requests=2 * num_streams))
        before, lag_before = server.usage(), _lag_buckets(server.url)
        with probed(server.url) as delays:
            run = _load(target, shape, writer, Plan(concurrency=num_streams, duration_s=seconds, seed=1))
        after, lag_after = server.usage(), _lag_buckets(server.url)
    name = f"{num_streams} streams, {api}"
    complete = [outcome for outcome in run.outcomes if outcome.error is None]
    lost = [outcome for outcome in run.outcomes if not _is_whole(outcome, api, shape.output_len)]
    report.add(f"{name}: answers that are not whole", "count", [len(lost)], target=0, answers=len(run.outcomes))
    tokens = sum(map(output_tokens, complete))
    events = sum(len(outcome.arrivals) for outcome in complete)
    report.add(f"{name}: tokens per second", "1/s", [tokens / run.wall_s], events_per_s=events / run.wall_s)
    for what, key in (("/health answers after", "answered"), ("an idle process is late by", "late")):
        values = [1e3 * delay for delay in delays[key]]
        report.add(f"{name}: p99, {what}", "ms", [percentile(values, 99)], median=percentile(values, 50))
    if lag_before is not None and lag_after is not None:
        bound = 1e3 * _percentile_bound({le: lag_after[le] - lag_before.get(le, 0) for le in lag_after}, 99)
        report.add(f"{name}: p99, {LAG_METRIC} is at most", "ms", [bound], target="<= 50")
    report.add(f"{name}: p99, lag of the client", "ms", [1e3 * percentile(run.lags_s, 99)])
    for process, use in after.items():
        share = (use.cpu_s - before[process].cpu_s) / run.wall_s
        report.add(
            f"{name}: {process}, resident memory", "MiB", [use.rss / 2**20], pss=use.pss / 2**20, cpu_share=share
        )
    total = sum(use.pss for use in after.values()) / 2**30
    report.add(f"{name}: both processes, shared pages once", "GiB", [total], target="<= 1.5")


def _is_whole(outcome: Outcome, api: str, num_tokens: int) -> bool:
    """Whether an answer has all of its tokens, by the server's count and, with `/generate`, by their ids."""
    said = outcome.reading
    if outcome.error or output_tokens(outcome) != num_tokens or not said.text:
        return False
    return api != "native" or len(said.token_ids) == num_tokens


@contextlib.contextmanager
def probed(url: str) -> Iterator[dict[str, list[float]]]:
    """Runs the probe inside the `with`. The yielded object has its results at the end."""
    delays: dict[str, list[float]] = {}
    command = [sys.executable, "-m", "bench.probe", url, str(PROBE_PERIOD_S)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        try:
            yield delays
            delays |= json.loads(probe.communicate()[0])
        finally:
            probe.kill()


def _lag_buckets(url: str) -> dict[float, float] | None:
    """The cumulative counts of the front's own histogram, by upper bound in seconds; None if it has none."""
    with _connected(url) as connection:
        connection.request("GET", "/metrics")
        response = connection.getresponse()
        text = response.read().decode()
    pattern = rf'^{re.escape(LAG_METRIC)}_bucket{{(?:[^}}]*,)?le="([^"]+)"[^}}]*}} (\S+)$'
    found = {float(bound): float(count) for bound, count in re.findall(pattern, text, re.MULTILINE)}
    return found or None


def _percentile_bound(cumulative: dict[float, float], percent: float) -> float:
    """The upper bound of the bucket in which the percentile lies."""
    wanted = max(cumulative.values()) * percent / 100
    return min(bound for bound, count in cumulative.items() if count >= wanted)


# The front with an engine that computes nothing.


def measure_null(
    report: Report, api: str, num_streams: int, rates: tuple[int, ...], seconds: float, num_processes: int = 1
) -> None:
    """Offers more and more tokens per second, until events have several tokens each. The front has one core for itself.

    The figures are tokens per second of wall time, and tokens per second of the front's own processor time, which other
    users of the machine change little. With several processes (`--front-processes`) all of them share the core, so the
    second figure says what each of them could do on a core of its own.
    """
    name = f"null engine, {api}, {num_streams} streams"
    if num_processes > 1:
        name += f", {num_processes} processes and a hub"
    most = most_single = per_cpu_s = 0.0
    for rate in rates:
        steps_per_s = max(1, rate // num_streams)
        num_tokens = round(steps_per_s * seconds)
        arguments = ["--steps-per-second", str(steps_per_s), "--front-core", str(FRONT_CORE)]
        arguments += ["--front-processes", str(num_processes)]
        with _on_core(OTHER_CORE), served(arguments, module="bench.null_engine") as server:
            run, cpu_s, hub_s = _null_run(server, api, num_streams, num_tokens)
        _check_texts(run, num_tokens)
        per_s, events_per_token, gap_s = _steady_rate(run)
        report.add(
            f"{name}, {steps_per_s * num_streams} tokens/s offered",
            "tokens/s",
            [per_s],
            events_per_token=events_per_token,
            gap_p99_in_steps=gap_s * steps_per_s,
            front_cpu_share=cpu_s / run.wall_s,
            hub_share_of_it=hub_s / cpu_s if num_processes > 1 else None,
            client_cpu_share=run.cpu_s / run.wall_s,
        )
        most, per_cpu_s = max(most, per_s), max(per_cpu_s, num_streams * num_tokens / cpu_s)
        if events_per_token < ONE_EVENT:
            break
        most_single = max(most_single, per_s)
    report.add(f"{name}, one core, an event each", "tokens/s", [most_single], target=">= 4000", in_any_events=most)
    report.add(f"{name}, for a second of processor time", "tokens", [per_cpu_s])


def _null_run(server: Served, api: str, num_streams: int, num_tokens: int) -> tuple[Run, float, float]:
    """Runs all streams at once, each with this many tokens. Also the processor time of the front, and its hub's."""
    target = Target(base_url=server.url, dialect=DIALECTS[api], ask=Ask(model="null", ignore_eos=True))
    shape = Shape(unique_len=8, output_len=num_tokens)
    before, hub_before = server.front_cpu_s(), server.usage()["front"].cpu_s
    gc.collect()
    gc.disable()  # a collection of the client's many arrivals would look like a gap of every stream
    run = _load(target, shape, Writer(), Plan(concurrency=num_streams, num_requests=num_streams))
    gc.enable()
    return run, server.front_cpu_s() - before, server.usage()["front"].cpu_s - hub_before


def _check_texts(run: Run, num_tokens: int) -> None:
    """Checks that every stream had every token once and in order."""
    tokenizer = load_tokenizer(resolve_model("tiny"))
    words = words_of(tokenizer)
    expected = tokenizer.decode([words[number % len(words)] for number in range(num_tokens)])
    for outcome in run.outcomes:
        assert outcome.error is None, f"{outcome.error}: {outcome.message}"
        assert output_tokens(outcome) == num_tokens
        assert outcome.reading.text.strip() == expected.strip(), "a stream is not what the engine made"


def _steady_rate(run: Run) -> tuple[float, float, float]:
    """While all streams ran: tokens a second, events a token, and the p99 of the seconds between events of a stream."""
    first = max(outcome.arrivals[0][0] for outcome in run.outcomes)
    last = min(outcome.arrivals[-1][0] for outcome in run.outcomes)
    events = sum(len(outcome.arrivals) for outcome in run.outcomes)
    tokens = sum(map(output_tokens, run.outcomes))
    # The number of tokens per event hardly changes, so the tokens of the middle are known from its events.
    inside = sum(first <= when <= last for outcome in run.outcomes for when, _ in outcome.arrivals)
    times = ([when for when, _ in outcome.arrivals if first <= when <= last] for outcome in run.outcomes)
    gaps = [after - before for each in times for before, after in itertools.pairwise(each)]
    return inside * (tokens / events) / (last - first), events / tokens, percentile(gaps, 99)


def measure_arrivals(report: Report, rate: int, seconds: float) -> None:
    """Sends so many requests per second of one token each, at equal distances, to an engine that costs nothing."""
    arguments = ["--steps-per-second", "1000", "--front-core", str(FRONT_CORE)]
    with _on_core(OTHER_CORE), served(arguments, module="bench.null_engine") as server:
        target = Target(base_url=server.url, dialect=DIALECTS["openai-completions"], ask=Ask(model="null"))
        before = server.front_cpu_s()
        plan = Plan(arrival="uniform", rate=rate, num_requests=round(rate * seconds))
        run = _load(target, Shape(unique_len=8, output_len=1), Writer(), plan)
        cpu_s = server.front_cpu_s() - before
    assert all(outcome.error is None for outcome in run.outcomes), "a request failed"
    report.add(
        f"requests of one token, {rate} a second offered",
        "requests/s",
        [len(run.outcomes) / run.wall_s],
        front_cpu_share=cpu_s / run.wall_s,
        client_cpu_share=run.cpu_s / run.wall_s,
    )


@contextlib.contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Keeps this process, and those that it starts, on one core inside the `with`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _load(target: Target, shape: Shape, writer: Writer, plan: Plan) -> Run:
    async def run() -> Run:
        async with open_session(600) as session:
            return await run_load(session, target, WORKLOADS["random"](shape, writer, plan.seed), plan)

    return asyncio.run(run())


# What frequent scrapes cost an idle server.


def measure_scrapes(report: Report, seconds: float) -> None:
    """Measures the front's processor time for a scrape every 50 ms, above that of a front that nobody asks."""
    with served(["serve", "--port", "0", "--metrics-alias", "vllm"]) as server:
        time.sleep(FIRST_REQUESTS_S)
        before = server.usage()["front"].cpu_s
        time.sleep(seconds)
        idle_s = server.usage()["front"].cpu_s - before
        for name, path, num_clients, headers in SCRAPERS:
            _ask_evenly(server, path, num_clients, headers, 1)
            cpu_s, num_asked, num_bytes = _ask_evenly(server, path, num_clients, headers, seconds)
            report.add(
                f"{name} every 50 ms",
                "ms of CPU",
                [1e3 * (cpu_s - idle_s) / num_asked],
                asked=num_asked,
                bytes=num_bytes,
            )


def _ask_evenly(
    server: Served, path: str, num_clients: int, headers: dict[str, str], seconds: float
) -> tuple[float, int, int]:
    """Asks at even distances. Returns the front's processor time, the number of requests, and the bytes of the last."""
    num_asked = num_bytes = 0
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(_connected(server.url)) for _ in range(num_clients)]
        before, began = server.usage()["front"].cpu_s, time.perf_counter()
        while (now := time.perf_counter() - began) < seconds:
            time.sleep(max(num_asked * SCRAPE_PERIOD_S / num_clients - now, 0))
            connection = connections[num_asked % num_clients]
            connection.request("GET", path, headers=headers)
            num_bytes, num_asked = len(connection.getresponse().read()), num_asked + 1
        return server.usage()["front"].cpu_s - before, num_asked, num_bytes


# What a chat with tools costs.


def measure_tools(report: Report, rounds: int) -> None:
    """Measures the front's processor time for a chat, in turns: without tools, with the same ones, with new ones."""
    numbers, tools = itertools.count(), [_tool(number) for number in range(NUM_TOOLS)]
    kinds: dict[str, Callable[[int], dict]] = {
        "without tools": lambda _: {},
        f"with {NUM_TOOLS} tools, as before": lambda _: {"tools": tools},
        f"with {NUM_TOOLS} tools, new ones": lambda number: {"tools": [_tool(0, f" {number}"), *tools[1:]]},
    }
    samples: dict[str, list[float]] = {name: [] for name in kinds}
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        _write_tokenizer(Path(directory))
        arguments = ["--steps-per-second", "1000", "--tokenizer", directory]
        server = stack.enter_context(served(arguments, module="bench.null_engine"))
        connection = stack.enter_context(_connected(server.url))
        for turn in range(rounds + 1):
            for name, fields in kinds.items():
                bodies = [_chat(f"Question {n}: is it warm in the city, and who is there?") | fields(n)
                          for n in itertools.islice(numbers, REQUESTS)]  # fmt: skip
                cost = _cpu_ms(server, connection, "/v1/chat/completions", bodies)
                if turn:  # the first one warms up
                    samples[name].append(cost)
    for name, values in samples.items():
        report.add(f"a chat {name}", "ms of CPU", values)


def measure_requests(report: Report, rounds: int) -> None:
    """Measures the front's processor time for a stream of one token, in turns."""
    numbers, samples = random.Random(0), dict[str, list[float]]()

    def ids(length: int) -> dict:
        return {"prompt": [numbers.randrange(5, 1000) for _ in range(length)]}

    def words(length: int) -> dict:
        return _chat(" ".join(numbers.choices(("the", "of", "time", "people", "about", "were", "could"), k=length)))

    completions, chats = "/v1/completions", "/v1/chat/completions"
    kinds = {"8 ids": (completions, ids, 8), "1088 ids": (completions, ids, 1088),
             "a chat of 8 words": (chats, words, 8), "a chat of 700 words": (chats, words, 700)}  # fmt: skip
    with (
        served(["--steps-per-second", "1000"], module="bench.null_engine") as server,
        _connected(server.url) as connection,
    ):
        for turn in range(rounds + 1):
            for name, (path, prompt, length) in kinds.items():
                bodies = [{"model": "null", "max_tokens": 1, "stream": True, **prompt(length)} for _ in range(REQUESTS)]
                cost = _cpu_ms(server, connection, path, bodies)
                if turn:
                    samples.setdefault(name, []).append(cost)
    for name, values in samples.items():
        report.add(f"a stream of one token, {name}", "ms of CPU", values)


def _chat(text: str) -> dict:
    return {"model": "null", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}


def _cpu_ms(server: Served, connection: http.client.HTTPConnection, path: str, bodies: list[dict]) -> float:
    """The front's processor time for a request, of those that are sent one after the other."""
    before = server.usage()["front"].cpu_s
    for body in bodies:
        connection.request("POST", path, json.dumps(body), JSON_HEADERS)
        response = connection.getresponse()
        assert response.read() and response.status == 200
    return 1e3 * (server.usage()["front"].cpu_s - before) / len(bodies)


def _tool(number: int, note: str = "") -> dict:
    """A tool as agents send it: 700 bytes."""
    described = {"type": "string", "description": "The name of the thing to look for, as the user has written it."}
    parameters: dict[str, dict] = {
        "name": described,
        "from_date": {"type": "string", "description": "The first day of the time, in the form 2026-11-30."},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100, "description": "The most results to give."},
        "order": {"type": "string", "enum": ["newest", "oldest", "largest", "smallest"]},
        "labels": {"type": "array", "items": {"type": "string"}, "description": "Labels that all results must have."},
    }
    function = {
        "name": f"find_things_{number}",
        "description": f"Finds things of kind {number} that the user owns or may see, with their dates.{note}",
        "parameters": {"type": "object", "properties": parameters, "required": ["name"]},
    }
    return {"type": "function", "function": function}


def _write_tokenizer(directory: Path) -> None:
    """The embedded tokenizer, with a chat template that shows tools in the way of Hermes."""
    for path in resolve_model("tiny").glob("*.json"):
        shutil.copy(path, directory)
    config = json.loads((directory / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% if tools %}<|system|>Tools:\n<tools>{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}</tools>\n"
        'Write <tool_call>\n{"name": name, "arguments": object}\n</tool_call><|end|>{% endif %}'
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}<|assistant|>"
    )
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.front", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), help=f"the parts to run, separated by commas, of {', '.join(PARTS)}"
    )
    parser.add_argument("--rounds", type=int, default=200, help="number of prompts in the part ttft")
    parser.add_argument("--streams", type=int, default=64, help="number of streams in the part streams")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the part streams runs")
    parser.add_argument(
        "--null-streams", type=int, nargs="+", default=NULL_STREAMS, help="numbers of streams in the part null"
    )
    parser.add_argument(
        "--null-rates", type=int, nargs="+", default=NULL_RATES, help="tokens per second to offer in the part null"
    )
    parser.add_argument(
        "--null-processes", type=int, nargs="+", default=[1], help="numbers of --front-processes in the part null"
    )
    parser.add_argument("--null-seconds", type=float, default=8.0, help="how long the part null offers each rate")
    parser.add_argument("--arrivals", type=int, default=1000, help="requests per second in the part arrivals")
    parser.add_argument(
        "--null-apis",
        nargs="+",
        default=["openai-chat", "openai-completions"],
        choices=DIALECTS,
        help="APIs that the part null asks",
    )
    parser.add_argument("--scrape-seconds", type=float, default=20.0, help="how long the part scrape asks in each way")
    parser.add_argument("--tool-rounds", type=int, default=7, help="rounds of the parts tools and requests, after one")
    parser.add_argument("--output", type=Path, help="JSON file for all samples")
    options = parser.parse_args(arguments)
    parts = options.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}, but got {', '.join(sorted(unknown))}")
    report = Report("bench.front", arguments, options.output, model="tiny")
    if "null" in parts:
        for api in options.null_apis:
            for num_streams, num in itertools.product(options.null_streams, options.null_processes):
                measure_null(report, api, num_streams, tuple(options.null_rates), options.null_seconds, num)
    if "arrivals" in parts:
        measure_arrivals(report, options.arrivals, options.null_seconds)
    if "scrape" in parts:
        measure_scrapes(report, options.scrape_seconds)
    if "tools" in parts:
        measure_tools(report, options.tool_rounds)
    if "requests" in parts:
        measure_requests(report, options.tool_rounds)
    if "streams" in parts:
        for api in STREAM_APIS:
            measure_streams(report, api, options.streams, options.seconds)
    if "ttft" in parts:
        measure_ttft(report, options.rounds)
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
