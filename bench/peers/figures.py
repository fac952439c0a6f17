"""The figures of one turn, and of one workload of all engines."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from typing import Any

from bench.peers.clients import Ran
from bench.peers.engines import Engine
from bench.peers.workloads import DECODES, Load, requests_of
from bench.report import Report
from bench.roofline import Rates, step_cost
from jsg.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One load on one engine.

    Attributes:
        ran: The answers and the wall time.
        cpu_s: Processor time of the engine's processes.
        others_cpu_s: That of all other engines in the meantime, which should be idle.
        pss: Bytes of memory of the engine's processes afterwards, shared pages once.
    """

    ran: Ran
    cpu_s: float
    others_cpu_s: float
    pss: int


def bound_s(config: ModelSpec, engine: Engine, rates: Rates, rows: int, prompt_len: int, output_len: int) -> float:
    """The least seconds in which this machine can answer `rows` equal requests, all in one batch.

    It is the floor of the prompts' step and of each step of one token per row (`Cost.floor_ms`): products with weights
    take the larger of bytes / bandwidth and operations / rate, and so does attention. The context of a step is the mean
    one of all steps, on which the bound depends linearly.
    """

    def floor_s(cached: int, new: int) -> float:
        kv_bytes = config.kv_bytes_per_token(engine.kv_itemsize)
        cost = step_cost(config, 4, rows=rows, cached=cached, new=new, kv_bytes_per_token=kv_bytes)
        head = config.hidden_size * config.vocab_size
        layers = cost.weight_bytes // 4 - head
        weight_bytes = round(layers * engine.weight_itemsize + head * engine.head_itemsize)
        return dataclasses.replace(cost, weight_bytes=weight_bytes).floor_ms(rates) / 1e3

    steps = output_len - 1
    return floor_s(0, prompt_len) + steps * floor_s(prompt_len + steps // 2, 1)


def facts_of(turns: Sequence[Turn], load: Load) -> dict[str, Any]:
    """Medians over the rounds: tokens per second, processor time, memory, and what the workload lets see."""

    def median(values: Sequence[float]) -> float:
        return statistics.median(values)

    answers = [turn.ran.answers for turn in turns]
    facts: dict[str, Any] = {"wall_range_s": [round(f(turn.ran.wall_s for turn in turns), 4) for f in (min, max)]}
    if not requests_of(load)[0].choices:
        walls = [turn.ran.wall_s for turn in turns]
        out = [sum(answer.output_tokens for answer in each) for each in answers]
        prompts = [sum(answer.prompt_tokens for answer in each) for each in answers]
        facts["output_tokens_per_s"] = median([count / wall for count, wall in zip(out, walls, strict=True)])
        facts["prompt_tokens_per_s"] = median([count / wall for count, wall in zip(prompts, walls, strict=True)])
        if all(answer.cached_tokens is not None for each in answers for answer in each):
            cached = [sum(answer.cached_tokens or 0 for answer in each) for each in answers]
            facts["cached_share"] = median([part / whole for part, whole in zip(cached, prompts, strict=True)])
    firsts = [each[0] for each in answers if each[0].first_s is not None and each[0].last_s is not None]
    if requests_of(load)[0].stream and firsts:
        facts["first_token_s"] = median([answer.first_s or 0.0 for answer in firsts])
        facts["decode_tokens_per_s"] = median([decode_rate(turn.ran) for turn in turns])
    if requests_of(load)[0].schema:
        facts["valid_objects"] = min(sum(is_character(answer.text) for answer in each) for each in answers)
    return facts | {
        "cpu_s": median([turn.cpu_s for turn in turns]),
        "others_cpu_s": median([turn.others_cpu_s for turn in turns]),
        "pss_mib": max(turn.pss for turn in turns) / 2**20,
    }


def decode_rate(ran: Ran) -> float:
    """Tokens per second of one streamed answer, from its first to its last token."""
    answer = ran.answers[0]
    if answer.first_s is None or answer.last_s is None or answer.last_s <= answer.first_s:
        return float("nan")
    return (answer.output_tokens - 1) / (answer.last_s - answer.first_s)


def is_character(text: str) -> bool:
    """Whether the text is a JSON object with the fields of the schema."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return False
    return isinstance(found, dict) and "wand" in found and len(found) == 8


def add_workload(
    report: Report,
    name: str,
    load: Load,
    turns: dict[str, list[Turn]],
    engines: Sequence[Engine],
    config: ModelSpec,
    rates: Rates,
) -> None:
    """Adds the wall time of each engine, and the ratio of each peer's time to jsg's in the same round."""
    by_name = {engine.name: engine for engine in engines}
    ours = next((engine for engine in by_name if engine.startswith("jsg")), None)
    for engine, found in turns.items():
        facts = facts_of(found, load)
        walls = [turn.ran.wall_s for turn in found]
        if name in DECODES:
            first = requests_of(load)[0]
            bound = bound_s(config, by_name[engine], rates, len(load), len(first.prompt), first.max_tokens)
            facts |= {"bound_s": bound, "of_bound": bound / statistics.median(walls)}
        report.add(f"{name}: {engine}", "s wall", walls, workload=name, engine=engine, **facts)
    for engine, found in turns.items():
        if ours in turns and engine != ours:
            pairs = zip(found, turns[ours], strict=True)
            ratios = [theirs.ran.wall_s / own.ran.wall_s for theirs, own in pairs]
            report.add(f"{name}: {engine} / {ours}", "ratio", ratios, workload=name, peer=engine)
