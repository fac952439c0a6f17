"""Puts load on a server with an OpenAI-compatible API (jsg, vLLM, SGLang, `transformers serve`) or with `/generate`.

    python -m bench.serving --base-url http://127.0.0.1:30000 --request-rate 4 --duration 60 --workload sharegpt

With `--request-rate` (or `--arrival burst`) the load is an open loop, with `--concurrency` a closed loop. It needs the
extra `bench`. `docs/benchmarking.md` says what is measured, and how to compare servers.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp

from bench.serving import report
from bench.serving.client import Outcome, Target, get_json, open_session, root_of, send
from bench.serving.dialects import DIALECTS, Ask
from bench.serving.load import ARRIVALS, Plan, Run, run_load
from bench.serving.statistics import summary
from bench.serving.workloads import WORKLOADS, Shape, Writer

GOOD_NAMES = ("ttft", "tpot", "itl", "e2e")
CALIBRATION_WORDS = (25, 150)
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")  # jsg and SGLang; vLLM


def main(arguments: list[str]) -> int:
    """Runs the load. Returns 0 if every request got its answer, else 1."""
    parser = _parser()
    options = parser.parse_args(arguments)
    problem = _problem(options)
    if problem:
        parser.error(problem)
    run, server = asyncio.run(_run(options, parser))
    found = summary(run, dict(options.goodput))
    head = report.header(arguments, server)
    print(report.table(found))
    if options.output:
        content = report.as_json(head | {"options": _shown(options)}, found, run, with_events=options.details)
        report.write(options.output, content)
    if options.plot:
        report.plot(options.plot, found, run)
    return 0 if found["complete"] == found["requests"] else 1


async def _run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> tuple[Run, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    async with open_session(options.timeout) as http:
        server = await _describe_server(http, options.base_url, headers)
        model = options.model or server.get("model")
        if model is None:
            parser.error("--model must be given where /v1/models does not say it, or the server does not answer")
        ask = Ask(
            model=model,
            temperature=options.temperature,
            ignore_eos=options.ignore_eos,
            stream=not options.no_stream,
            continuous_usage=options.continuous_usage,
            extra_body=options.extra_body,
        )
        target = Target(base_url=options.base_url, dialect=DIALECTS[options.api], ask=ask, headers=headers)
        writer = await _writer(http, target, options)
        shape = _shape(options)
        await _warm_up(http, target, writer, shape, options)
        if options.flush_cache:
            await _flush_cache(http, options.base_url, headers)
        plan = Plan(
            concurrency=options.concurrency,
            arrival=options.arrival or "poisson",
            rate=options.request_rate,
            num_requests=options.num_requests,
            duration_s=options.duration,
            seed=options.seed,
        )
        return await run_load(http, target, WORKLOADS[options.workload](shape, writer, options.seed), plan), server


async def _describe_server(http: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str]) -> dict[str, Any]:
    """What the server says about itself: its model, its software and its version, as far as it gives them."""
    found: dict[str, Any] = {}
    models = await get_json(http, base_url, "/v1/models", headers)
    if isinstance(models, dict) and models.get("data"):
        card = models["data"][0]
        found = {"model": card.get("id"), "owned_by": card.get("owned_by")}
    for path in ("/version", "/get_server_info"):
        described = await get_json(http, base_url, path, headers)
        if isinstance(described, dict) and "version" in described:
            found["version"] = described["version"]
            break
    return found


async def _writer(http: aiohttp.ClientSession, target: Target, options: argparse.Namespace) -> Writer:
    """The writer of prompts, of ids or of words. The tokens per word are given, measured on the server, or 1."""
    if options.prompt_ids:
        return Writer(vocab_size=options.vocab_size)
    if options.tokens_per_word is not None:
        return Writer(tokens_per_word=options.tokens_per_word)
    lengths, failure = [], ""
    for num_words in CALIBRATION_WORDS:
        words = Writer().write(calibration_words(), num_words)
        outcome = Outcome(group=0, due_s=0.0, sent_s=0.0)
        await send(http, target, [words], 1, outcome)
        lengths.append(outcome.reading.prompt_tokens)
        failure = f" ({outcome.error}: {outcome.message})" if outcome.error else ""
    if None in lengths:
        print(f"note: the server does not say how long prompts are{failure}: a word is taken to be a token")
        return Writer()
    # The difference of two prompts does not contain the tokens that a chat template adds to both.
    tokens_per_word = (lengths[1] - lengths[0]) / (CALIBRATION_WORDS[1] - CALIBRATION_WORDS[0])
    print(f"a word is {tokens_per_word:.3f} tokens of this server")
    return Writer(tokens_per_word=max(0.1, tokens_per_word))


def calibration_words() -> random.Random:
    """Words that no workload has, so that no prompt of the load is in the server's cache before it."""
    return random.Random("calibration")


def warm_up_seed(seed: int) -> int:
    """The seed of the warm-up. No run has it, because seeds of runs are not negative."""
    return -1 - seed


async def _warm_up(
    http: aiohttp.ClientSession, target: Target, writer: Writer, shape: Shape, options: argparse.Namespace
) -> None:
    """Sends some requests of the same shape with another seed, which are not counted."""
    if options.warmup_requests:
        sessions = WORKLOADS[options.workload](shape, writer, warm_up_seed(options.seed))
        concurrency = min(options.warmup_requests, options.concurrency or 8)
        await run_load(http, target, sessions, Plan(concurrency=concurrency, num_requests=options.warmup_requests))


async def _flush_cache(http: aiohttp.ClientSession, base_url: str, headers: Mapping[str, str]) -> None:
    for path in FLUSH_PATHS:
        async with http.post(root_of(base_url) + path, headers=headers) as response:
            if response.status == 200:
                return
    sys.exit(f"--flush-cache needs one of {', '.join(FLUSH_PATHS)}, but the server refused each; start it afresh")


def _shape(options: argparse.Namespace) -> Shape:
    given = {field.name: getattr(options, field.name) for field in dataclasses.fields(Shape)}
    return Shape(**given)


def _problem(options: argparse.Namespace) -> str | None:
    """What is wrong with the combination of options; None if nothing is."""
    is_closed = options.concurrency is not None
    is_open = options.request_rate is not None or options.arrival == "burst"
    if is_closed == is_open:
        return "give either --concurrency (closed loop) or --request-rate or --arrival burst (open loop)"
    if is_closed and options.arrival is not None:
        return "--arrival belongs to the open loop; leave it out with --concurrency"
    if options.arrival == "burst" and options.request_rate is not None:
        return "a burst has no --request-rate; leave one of the two out"
    if options.num_requests is None and options.duration is None:
        return "give --num-requests, --duration or both, so that the load ends"
    if options.arrival == "burst" and not is_closed and options.num_requests is None:
        return "--arrival burst needs --num-requests"
    if options.continuous_usage and (options.no_stream or options.api == "native"):
        return "--continuous-usage is for streams of the OpenAI APIs; native events say it anyway"
    if options.no_stream and any(name != "e2e" for name, _ in options.goodput):
        return "--goodput knows only e2e with --no-stream: the other limits are of streams"
    if options.prompt_ids and not DIALECTS[options.api].takes_ids:
        return f"--prompt-ids needs an API that takes ids, but {options.api} takes text only"
    if options.prompt_ids and options.vocab_size is None:
        return "--prompt-ids needs --vocab-size"
    return None


def _shown(options: argparse.Namespace) -> dict[str, Any]:
    shown = {name: value for name, value in vars(options).items() if name not in ("api_key", "output", "plot")}
    return shown | {"goodput": dict(options.goodput)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,  # a report hides the API key, for which it needs the option's full name
    )
    _add_target_options(parser)
    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency", type=_positive(int), help="closed loop: number of clients, each with one request"
    )
    load.add_argument("--request-rate", type=_positive(float), help="open loop: arrivals per second")
    load.add_argument("--arrival", choices=ARRIVALS, help="open loop: how arrivals are spaced; default poisson")
    load.add_argument("--num-requests", type=_positive(int), help="end the load after this number of requests")
    load.add_argument(
        "--duration",
        type=_positive(float),
        help="send no more requests after this many seconds; open answers are waited for",
    )
    load.add_argument(
        "--warmup-requests",
        type=int,
        default=0,
        help="number of requests to send before the load, which are not counted",
    )
    load.add_argument("--flush-cache", action="store_true", help="empty the server's prefix cache after the warm-up")
    load.add_argument("--seed", type=int, default=0, help="seed of prompts, lengths and arrivals")
    load.add_argument(
        "--timeout", type=_positive(float), default=600.0, help="seconds until a request counts as failed"
    )
    _add_workload_options(parser)
    result = parser.add_argument_group("result")
    result.add_argument(
        "--goodput",
        type=_limit,
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="latency limits for goodput, such as ttft:200 itl:50",
    )
    result.add_argument("--output", type=Path, help="JSON file for the report")
    result.add_argument("--details", action="store_true", help="also write the time of every event to the report")
    result.add_argument("--plot", type=Path, help="PNG file for plots of the run")
    return parser


def _add_target_options(parser: argparse.ArgumentParser) -> None:
    target = parser.add_argument_group("server")
    target.add_argument("--base-url", required=True, help="the server's URL, with or without /v1")
    target.add_argument("--model", help="name of the model; default: the first one in /v1/models")
    target.add_argument("--api", choices=DIALECTS, default="openai-completions", help="the API to use")
    target.add_argument("--api-key", help="bearer token; no report contains it")
    target.add_argument("--temperature", type=float, default=0.0, help="sampling temperature; 0 is greedy")
    target.add_argument(
        "--ignore-eos", action="store_true", help="make every answer exactly as long as the workload says"
    )
    target.add_argument(
        "--no-stream", action="store_true", help="ask for answers that are not streamed; then only e2e is measured"
    )
    target.add_argument(
        "--continuous-usage",
        action="store_true",
        help="ask for the number of tokens in every event (vLLM, SGLang, jsg)",
    )
    target.add_argument(
        "--extra-body", type=_json_object, default={}, metavar="JSON", help="fields to add to every request"
    )


def _add_workload_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload (lengths in tokens)")
    group.add_argument("--workload", choices=WORKLOADS, default="shared-prefix", help="the kind of requests")
    group.add_argument(
        "--prompt-ids", action="store_true", help="send prompts as token ids below --vocab-size instead of words"
    )
    group.add_argument("--vocab-size", type=_positive(int), help="size of the model's vocabulary, for --prompt-ids")
    group.add_argument(
        "--tokens-per-word", type=_positive(float), help="mean tokens of a word; default: measured with two requests"
    )
    helps = {
        "groups": "number of shared prefixes (tree: of roots)",
        "shared_len": "tokens that the requests of a group share (tree: from the root to a leaf)",
        "unique_len": "tokens that only one request or turn has",
        "output_len": "tokens of each answer",
        "turns": "turns of a conversation (multi-turn)",
        "depth": "depth of the tree",
        "branching": "children of each node of the tree",
        "input_mean": "mean length of prompts, which are log-normal (sharegpt)",
        "input_sigma": "standard deviation of the logarithm of prompt lengths (sharegpt)",
        "output_mean": "mean length of answers, which are log-normal (sharegpt)",
        "output_sigma": "standard deviation of the logarithm of answer lengths (sharegpt)",
        "max_input_len": "longest prompt; longer ones are cut (sharegpt)",
        "max_output_len": "longest answer; longer ones are cut (sharegpt)",
        "range_ratio": "lengths are uniform from this fraction of unique-len and output-len to all of it (random)",
    }
    for field in dataclasses.fields(Shape):
        kind = int if isinstance(field.default, int) else float
        text = f"{helps[field.name]}; default {field.default}"
        group.add_argument(f"--{field.name.replace('_', '-')}", type=_positive(kind), default=field.default, help=text)


def _positive[T: (int, float)](kind: type[T]) -> Any:
    def parse(text: str) -> T:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"must be a positive number, but got {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    if name not in GOOD_NAMES or not limit:
        raise argparse.ArgumentTypeError(f"must be NAME:MS with NAME one of {', '.join(GOOD_NAMES)}, but got {text!r}")
    return name, float(limit)


def _json_object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, but got {text!r}")
    return value


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
