"""Times `Router.route` beside the number of engines; it needs no model of engines."""

import random
import time

from bench.report import Report
from jsg.engine.front.routing import Router
from jsg.prompt_ids import PromptIds
from jsg.types import Request, SamplingParams

PROMPT_LEN = 4096
TIMES = 60
TARGET = "<= 1000 for 1024 engines"


def measure_choice(report: Report, sizes: tuple[int, ...]) -> None:
    """Half of a prompt is in all engines, or, where nothing is common, in none."""
    for size in sizes:
        for is_common in (False, True):
            samples = _samples_us(size, is_common)
            common = "half of it in all" if is_common else "none of it known"
            report.add(f"choice among {size}, {PROMPT_LEN} tokens, {common}", "us", samples, target=TARGET)


def _samples_us(num_engines: int, is_common: bool) -> list[float]:
    rng = random.Random(0)
    router, among = Router([10**5] * num_engines), range(num_engines)
    common = _tokens(rng, PROMPT_LEN // 2)

    def request() -> Request:
        first = common if is_common else _tokens(rng, PROMPT_LEN // 2)
        ids = first + _tokens(rng, PROMPT_LEN // 2)
        return Request(rid="r", input_ids=PromptIds.of(ids), sampling=SamplingParams(max_new_tokens=16))

    for engine in among:
        routed = router.route(request(), [engine])
        router.begin(routed, routed.num_matched)
        router.end(routed, range(16))
    samples = []
    for _ in range(TIMES):
        asked = request()
        started = time.perf_counter()
        routed = router.route(asked, among)
        samples.append(1e6 * (time.perf_counter() - started))
        router.begin(routed, routed.num_matched)
        router.end(routed, range(16))
    return samples


def _tokens(rng: random.Random, size: int) -> tuple[int, ...]:
    return tuple(rng.randrange(50_000) for _ in range(size))
