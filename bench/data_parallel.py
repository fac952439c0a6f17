"""Compares several engines (`--dp-size`) with one large engine: cache hits, balance, and the cost of routing.

    python -m bench.data_parallel [--only router,start,loads] [--dp-size 2] [--output FILE]

router  the front's time in `Router` for one request, for prompts of several lengths; it needs no engine
start   the time from the start of the engine processes until all are ready, with an empty and with a full compile cache
loads   the same requests for one engine with the whole pool and batch, and for several engines that share both: hit
        rates, balance, throughput. The engines are real, with the embedded model, and run on one CPU
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from bench.report import Report
from bench.serving.workloads import WORKLOADS, Session, Shape, Writer
from jsg.config import EngineConfig
from jsg.engine.front.children import EngineChild
from jsg.engine.front.fleet import open_engines
from jsg.engine.front.routing import Router
from jsg.engine.front.served import ServedEngine
from jsg.prompt_ids import PromptIds
from jsg.types import Request, RequestOutput, SamplingParams

PARTS = ("router", "start", "loads")
TINY_VOCAB = 1408
CONCURRENCY = 16
POOL_TOKENS = 32_768  # of all engines together
ROUTED_LENS = (64, 512, 4096, 32_768)
ROUTED_ENGINES = 8
ROUTED_TIMES = 200
TARGET_HIT_RATE = ">= 0.95 of one engine"
TARGET_BALANCE = "<= 0.2"


class Load(NamedTuple):
    """The requests of one measurement.

    Attributes:
        workload: The name of a workload in `bench.serving.workloads`.
        shape: The workload's options.
        num_sessions: How many of its sessions are sent, `CONCURRENCY` of them at a time.
    """

    workload: str
    shape: Shape
    num_sessions: int

    def sessions(self) -> Iterator[Session]:
        """The same ones each time."""
        made = WORKLOADS[self.workload](self.shape, Writer(vocab_size=TINY_VOCAB), 0)
        return islice(made, self.num_sessions)


def _prefixes(groups: int) -> Shape:
    return Shape(groups=groups, shared_len=512, unique_len=32, output_len=8)


LOADS = {
    "1 prefix": Load("shared-prefix", _prefixes(1), 64),  # the load of bench.shared_prefix
    "16 prefixes": Load("shared-prefix", _prefixes(16), 400),
    "48 prefixes": Load("shared-prefix", _prefixes(48), 600),  # three quarters of the pool
    "chats": Load("multi-turn", Shape(groups=4, shared_len=256, unique_len=32, output_len=32, turns=4), 60),
    "nothing shared": Load("random", Shape(unique_len=128, output_len=16, range_ratio=0.1), 400),
}


class Run(NamedTuple):
    """The result of a load.

    Attributes:
        wall_s: Its wall time in seconds.
        prompt_tokens, cached_tokens: The sums over all requests.
        work: The number of tokens that each engine computed.
    """

    wall_s: float
    prompt_tokens: int
    cached_tokens: int
    work: list[int]

    @property
    def hit_rate(self) -> float:
        """The fraction of prompt tokens that came from a cache."""
        return self.cached_tokens / self.prompt_tokens

    @property
    def unevenness(self) -> float:
        """The largest difference of an engine's work from the mean, relative to the mean; 0 if all have the same."""
        return max(abs(count - statistics.mean(self.work)) for count in self.work) / statistics.mean(self.work)


def config_of(dp_size: int, cache: Path | None = None) -> EngineConfig:
    """The config of one engine with its part of pool and batch; by default with the compile cache of servers."""
    return EngineConfig(
        max_total_tokens=POOL_TOKENS // dp_size,
        max_running_requests=CONCURRENCY // dp_size,
        chunked_prefill_size=256,
        compilation_cache_dir=None if cache is None else str(cache),
    )


async def run_loads(dp_size: int) -> dict[str, Run]:
    """Starts the engines, sends each load to them with empty caches, and ends them."""
    config = config_of(dp_size)
    client = open_engines([EngineChild.spawn(config) for _ in range(dp_size)], config)
    try:
        await client.ready()
        while sum([(await engine.stats())["num_programs_pending"] for engine in client.engines]):
            await asyncio.sleep(1)
        return {name: await _run_load(client, load) for name, load in LOADS.items()}
    finally:
        await client.close()


async def _run_load(client: ServedEngine, load: Load) -> Run:
    while not await client.flush_cache():
        await asyncio.sleep(0.1)
    sessions, totals = enumerate(load.sessions()), [0, 0]

    async def work_off() -> None:
        for number, session in sessions:
            await _talk(client, number, session, totals)

    before = [await engine.stats() for engine in client.engines]
    started = time.perf_counter()
    await asyncio.gather(*(work_off() for _ in range(CONCURRENCY)))
    wall_s = time.perf_counter() - started
    after = [await engine.stats() for engine in client.engines]
    work = [_computed(a) - _computed(b) for a, b in zip(after, before, strict=True)]
    return Run(wall_s, totals[0], totals[1], work)


def _computed(stats: dict[str, int | float]) -> int:
    """The number of tokens that an engine has computed."""
    return int(stats["prompt_tokens"] - stats["cached_tokens"] + stats["generated_tokens"])


async def _talk(client: ServedEngine, number: int, session: Session, totals: list[int]) -> None:
    said: tuple[int, ...] = ()
    for index, turn in enumerate(session.turns):
        assert not isinstance(turn.text, str)
        said += tuple(turn.text)
        sampling = SamplingParams(max_new_tokens=turn.max_tokens, temperature=0, ignore_eos=True)
        request = Request(rid=f"{number}_{index}", input_ids=PromptIds.of(said), sampling=sampling)
        arrived = asyncio.Queue[RequestOutput | Exception]()
        end = client.begin(request, "", arrived.put_nowait)
        try:
            output = None
            while output is None or output.finish is None:
                if isinstance(output := await arrived.get(), Exception):
                    raise output
                said += output.token_ids
            totals[0] += output.prompt_tokens
            totals[1] += output.cached_tokens
        finally:
            end()


def measure_loads(report: Report, dp_size: int) -> None:
    """All loads for one engine, then all for several."""
    ones, severals = (asyncio.run(run_loads(size)) for size in (1, dp_size))
    for name, load in LOADS.items():
        one, several = ones[name], severals[name]
        num_requests = load.num_sessions * len(next(load.sessions()).turns)
        shares = load.workload != "random"
        if shares:
            best = {"of_one": several.hit_rate / one.hit_rate, "target": TARGET_HIT_RATE}
            report.add(f"{name}: hit rate, 1 engine", "part", [one.hit_rate], requests=num_requests)
            report.add(f"{name}: hit rate, {dp_size} engines", "part", [several.hit_rate], **best)
        target = {} if shares else {"target": TARGET_BALANCE}
        report.add(f"{name}: unevenness", "part", [several.unevenness], computed_tokens=several.work, **target)
        report.add(f"{name}: requests per second, 1 engine", "1/s", [num_requests / one.wall_s])
        report.add(f"{name}: requests per second, {dp_size} engines", "1/s", [num_requests / several.wall_s])


def measure_router(report: Report) -> None:
    """Times choosing an engine, the first output and the end of a request together.

    The engines' indexes are full, and one of them has the prompt's prefix.
    """
    for size in ROUTED_LENS:
        router = Router([10**6] * ROUTED_ENGINES)
        writer, sampling = Writer(vocab_size=TINY_VOCAB), SamplingParams(max_new_tokens=16)
        sessions = WORKLOADS["shared-prefix"](Shape(groups=32, shared_len=size // 2, unique_len=size // 2), writer, 0)
        prompts = [session.turns[0].text for session in islice(sessions, ROUTED_TIMES)]
        requests = [
            Request(rid="r", input_ids=PromptIds.of(ids), sampling=sampling)
            for ids in prompts
            if not isinstance(ids, str)
        ]
        among, output, samples = range(ROUTED_ENGINES), tuple(range(16)), []
        for request in requests:
            started = time.perf_counter()
            routed = router.route(request, among)
            router.begin(routed, routed.num_matched)
            router.end(routed, output)
            samples.append(1e6 * (time.perf_counter() - started))
        report.add(f"router, {size} prompt tokens, {ROUTED_ENGINES} engines", "us", samples)


def measure_start(report: Report, dp_size: int) -> None:
    """One engine and several, each with a compile cache that is empty and then full."""
    for size in (1, dp_size):
        with tempfile.TemporaryDirectory() as cache:  # mode 0700, as the cache must be
            for state in ("empty", "full"):
                seconds = asyncio.run(_start_s(config_of(size, Path(cache)), size))
                report.add(f"ready, {size} of {dp_size} engines, compile cache {state}", "s", [seconds])


async def _start_s(config: EngineConfig, dp_size: int) -> float:
    started = time.perf_counter()
    client = open_engines([EngineChild.spawn(config) for _ in range(dp_size)], config)
    try:
        await client.ready()
        return time.perf_counter() - started
    finally:
        await client.close()


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.data_parallel", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="the parts to run, separated by commas")
    parser.add_argument("--dp-size", type=int, default=2, help="number of engines")
    parser.add_argument("--output", type=Path, help="JSON file for all samples")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--only must name some of {', '.join(PARTS)}, but got {', '.join(sorted(unknown))}")
    report = Report(
        "bench.data_parallel", arguments, options.output, model="tiny", concurrency=CONCURRENCY, pool=POOL_TOKENS
    )
    parts: dict[str, Callable[[], None]] = {
        "router": lambda: measure_router(report),
        "start": lambda: measure_start(report, options.dp_size),
        "loads": lambda: measure_loads(report, options.dp_size),
    }
    for part in PARTS:
        if part in chosen:
            parts[part]()
    report.close()


if __name__ == "__main__":
    main(sys.argv[1:])
