"""Requests through the whole engine: its speed beside the bare step, the gain of a shared prefix, and its start."""

import contextlib
import dataclasses
import functools
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from bench.device.events import Part
from bench.device.plan import Load, Plan
from jsg.config import EngineConfig
from jsg.engine import shapes
from jsg.engine.child.protocol import Progress
from jsg.engine.core import EngineCore
from jsg.engine.device.executables import Executables
from jsg.engine.device.programs import GREEDY
from jsg.prompt_ids import PromptIds
from jsg.sched.buckets import Buckets, Phase, make_buckets
from jsg.types import Request, SamplingParams

BLOCKS = 8
"""The number of groups of steps that are timed, after one that is not."""
SETTLING_STEPS = 8
AGREEMENT_ROWS = 8


def measure(part: Part) -> None:
    """Measures everything with one engine. It has only the measured shapes, because lowering all takes too long."""
    shapes.make_buckets = functools.partial(_few_buckets, part.plan)
    # Otherwise variants that nothing here uses would compile during the measurement.
    Executables.compile_rest_in_background = lambda self: None
    core = EngineCore(make_config(part, chunk=part.plan.chunk, cache="cache"))
    _compile_what_is_measured(core)
    part.header(engine=dataclasses.asdict(core.info) | {"model_path": "random weights"})
    for rows in part.plan.batches:
        name = f"engine, decode B={rows}"
        part.attempt(name, functools.partial(_decode, part, core, name, rows))
    part.attempt("engine, alone", functools.partial(_alone, part, core))
    part.attempt("engine, shared load", functools.partial(_shared, part, core))
    part.attempt("engine, concurrent load", functools.partial(_concurrent, part, core))
    part.attempt("engine, agreement", functools.partial(_agreement, part, core))


def measure_chips(part: Part) -> None:
    """Measures decode steps and one request on all devices of the host; of simulated ones on two."""
    count = jax.device_count() if part.plan.is_for_accelerators else 2
    if count == 1:
        part.left_out("the host has one device")
        return
    shapes.make_buckets = functools.partial(_few_buckets, part.plan)
    Executables.compile_rest_in_background = lambda self: None
    core = EngineCore(make_config(part, chunk=part.plan.chunk, cache="cache", tp_size=count))
    _compile_what_is_measured(core)
    for rows in part.plan.batches:
        name = f"{count} devices, decode B={rows}"
        part.attempt(name, functools.partial(_decode, part, core, name, rows, kind="chips", devices=count))
    part.attempt(f"{count} devices, agreement", functools.partial(_agreement, part, core, kind="chips-agreement"))


def measure_start(part: Part) -> None:
    """Starts an engine with default options and records the time of each stage: with an empty and with a full cache."""
    phases = _Phases(part.age_s)
    # It has a separate cache, because the earlier parts have compiled some of the same programs.
    core = EngineCore(make_config(part, chunk=None, cache="start-cache"), report=phases.note)
    ready_s, seconds = part.age_s, phases.seconds()
    core.close()
    state = part.name.removeprefix("start-")
    facts = {f"{name}_s": value for name, value in seconds.items()} | {"with_weights_s": round(ready_s, 2)}
    weightless = ready_s - seconds.get("load", 0.0)
    part.add(f"start of process to ready, weights aside, {state}", "s", [weightless], kind=f"start-{state}", **facts)


def first_answer_s(part: Part, core: EngineCore) -> float:
    """Seconds from the start of the process to the first token of a first request."""
    _run_all(core, _prompts(part, Load(1, 0, 16, 1), seed=0), 1)
    return part.age_s


def _few_buckets(plan: Plan, max_running: int, chunk: int, **options: Any) -> Buckets:
    """The smallest and the largest extend shape, and the decode shapes of the loads."""
    every = make_buckets(max_running, chunk, **options)
    rows = {*plan.batches, plan.concurrent.num_requests, plan.shared.num_requests}
    grouped = every.pick_grouped(plan.shared.num_requests)
    return dataclasses.replace(
        every,
        decode=tuple(sorted({every.pick(Phase.DECODE, count) for count in rows})),
        extend=tuple(sorted({every.extend[0], every.extend[-1]})),
        grouped=(grouped,) if grouped else (),
    )


def _compile_what_is_measured(core: EngineCore) -> None:
    """Compiles the shapes that an engine in service would compile in its background."""
    buckets = core.scheduler._config.buckets
    names: list[Any] = [("forward", key) for key in buckets.all]
    names += [("sample", num_rows, GREEDY) for num_rows in sorted(_plain_rows(buckets))]
    core._executables.compile(names)
    core._runner.warm_up()


class _Phases:
    """The time of each stage of a start, from its progress reports."""

    def __init__(self, before_s: float):
        self._last = time.monotonic()
        self._seconds = {"before": before_s}

    def note(self, progress: Progress) -> None:
        """Counts the time since the last report for this stage, because a stage also reports at its end."""
        now = time.monotonic()
        self._seconds[progress.stage] = self._seconds.get(progress.stage, 0.0) + now - self._last
        self._last = now

    def seconds(self) -> dict[str, float]:
        """The seconds of each stage. Everything before the engine, such as imports, is the stage "before"."""
        return {name: round(value, 2) for name, value in self._seconds.items()}


def make_config(part: Part, *, chunk: int | None, cache: str, tp_size: int = 1) -> EngineConfig:
    plan = part.plan
    return EngineConfig(
        model_path=str(part.model_directory()),
        load_format="dummy",
        dtype=plan.dtype,
        context_length=min(plan.engine_context, plan.shape["max_position_embeddings"]),
        max_running_requests=plan.max_running,
        max_total_tokens=plan.engine_pool_tokens,
        chunked_prefill_size=chunk and max(chunk, plan.max_running),
        compilation_cache_dir=str(part.folder / cache),
        tp_size=tp_size,
    )


def _decode(part: Part, core: EngineCore, name: str, rows: int, *, kind: str = "engine", **facts: Any) -> None:
    """Milliseconds of a decode step, as the mean of several, because steps overlap and cannot be timed one by one."""
    plan = part.plan
    core.flush_cache()
    num_timed = BLOCKS * plan.steps
    num_prefills = rows * plan.context // plan.chunk  # the first requests decode meanwhile, the last ones do not yet
    prompt_len = max(1, plan.context - SETTLING_STEPS - (num_timed + num_prefills) // 2)
    tokens_left = core.info.context_length - prompt_len
    prompts = _prompts(part, Load(rows, 0, prompt_len, tokens_left), seed=rows)
    with _running(core, prompts, tokens_left) as num_generated:
        num_generated += _step(core, SETTLING_STEPS)
        samples, num_tokens = [], 0
        for _ in range(BLOCKS):
            begin = time.perf_counter()
            num_tokens += _step(core, plan.steps)
            samples.append((time.perf_counter() - begin) / plan.steps * 1e3)
    context = prompt_len + (num_generated + num_tokens / 2) / rows
    per_step = num_tokens / num_timed  # must be the number of rows, or something else was measured
    facts |= {"rows": rows, "context": context, "tokens_per_step": per_step}
    facts["tokens_per_s"] = per_step / min(samples) * 1e3
    part.add(f"{name} ctx {plan.context}", "ms", samples, kind=kind, **facts)


def _alone(part: Part, core: EngineCore) -> None:
    """Measures one request, from its first token to its last."""
    plan, count = part.plan, part.plan.alone_tokens
    load = Load(1, 0, plan.context - count // 2, count)
    samples = []
    for seed in range(4):
        core.flush_cache()
        [times] = _run_all(core, _prompts(part, load, seed), count).times.values()
        samples.append((times[-1] - times[0]) / (count - 1) * 1e3)
    facts = {"tokens_per_s": 1e3 / min(samples[1:]), "context": plan.context}
    part.add(f"engine, one request alone ctx {plan.context}", "ms/token", samples[1:], kind="engine-alone", **facts)


def _concurrent(part: Part, core: EngineCore) -> None:
    samples = _load_seconds(part, core, part.plan.concurrent)
    _add_load(part, "concurrent", samples, part.plan.concurrent, shares=True)


def _shared(part: Part, core: EngineCore) -> None:
    """Measures the same load twice: running requests read their common prefix together, or each by itself."""
    load, seconds = part.plan.shared, {}
    for shares in (True, False):
        with contextlib.nullcontext() if shares else _reading_alone(core):
            seconds[shares] = _load_seconds(part, core, load)
        _add_load(part, "shared", seconds[shares], load, shares=shares)
    ratio = [min(seconds[False]) / min(seconds[True])]
    can_share = bool(core.scheduler._config.buckets.grouped)
    part.add("shared load, without cascade / with", "x", ratio, kind="cascade-gain", can_share=can_share)


def _load_seconds(part: Part, core: EngineCore, load: Load) -> list[float]:
    """Seconds of the whole load, with prefill. Each run has new prompts and an empty cache; the first is not timed."""
    found = []
    for seed in range(3):
        core.flush_cache()
        run = _run_all(core, _prompts(part, load, seed), load.output_len)
        found.append(run.seconds)
        if any(len(tokens) != load.output_len for tokens in run.tokens.values()):
            raise RuntimeError("a request ended early")
    return found[1:]


def _add_load(part: Part, name: str, samples: list[float], load: Load, *, shares: bool) -> None:
    rate = load.num_requests * load.output_len / min(samples)
    shown = f"engine, {name} load" + ("" if shares else ", no cascade")
    facts = dataclasses.asdict(load) | {"load": name, "shares": shares, "tokens_per_s": rate}
    part.add(shown, "s", samples, kind="engine-load", **facts)


def _agreement(part: Part, core: EngineCore, *, kind: str = "agreement") -> None:
    """Records how often the same prompts have the same answers in one batch and one by one. In bfloat16 some differ."""
    load = Load(min(AGREEMENT_ROWS, part.plan.max_running), 0, 32, 16)
    prompts = _prompts(part, load, seed=0)
    together = _run_all(core, prompts, load.output_len).tokens
    equal = 0
    for index, prompt in enumerate(prompts):
        core.flush_cache()
        [alone] = _run_all(core, [prompt], load.output_len).tokens.values()
        equal += sum(a == b for a, b in zip(together[str(index)], alone, strict=True))
    rate = equal / (load.num_requests * load.output_len)
    part.add("greedy tokens equal in a batch and alone", "fraction", [rate], kind=kind, answer=together["0"])


@contextlib.contextmanager
def _reading_alone(core: EngineCore) -> Iterator[None]:
    """Keeps the scheduler from forming groups inside the `with`."""
    batcher = core.scheduler._batcher
    buckets = batcher._buckets
    batcher._buckets = dataclasses.replace(buckets, grouped=())
    try:
        yield
    finally:
        batcher._buckets = buckets


@contextlib.contextmanager
def _running(core: EngineCore, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> Iterator[int]:
    """Runs requests up to their first tokens, yields the number of tokens so far, and aborts them at the end."""
    waiting, num_generated = {str(index) for index in range(len(prompts))}, 0
    for index, prompt in enumerate(prompts):
        core.add(Request(rid=str(index), input_ids=PromptIds.of(prompt), sampling=_greedy(num_tokens)))
    try:
        while waiting:
            outputs = core.step()
            waiting -= {output.rid for output in outputs if output.token_ids}
            num_generated += sum(len(output.token_ids) for output in outputs)
        yield num_generated
    finally:
        for index in range(len(prompts)):
            core.abort(str(index))
        while core.has_work:
            core.step()


def _step(core: EngineCore, count: int) -> int:
    """Makes `count` steps and returns the number of their tokens.

    A step reads the tokens of the step before it, so times are right to one step.
    """
    return sum(len(output.token_ids) for _ in range(count) for output in core.step())


@dataclasses.dataclass(frozen=True, slots=True)
class _Answers:
    """The results of requests: by rid the tokens and the time of each token, and the time of all together."""

    tokens: dict[str, list[int]]
    times: dict[str, list[float]]
    seconds: float


def _run_all(core: EngineCore, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> _Answers:
    tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    times: dict[str, list[float]] = {rid: [] for rid in tokens}
    begin = time.perf_counter()
    for rid, prompt in zip(tokens, prompts, strict=True):
        core.add(Request(rid=rid, input_ids=PromptIds.of(prompt), sampling=_greedy(num_tokens)))
    while core.has_work:
        for output in core.step():
            tokens[output.rid] += output.token_ids
            times[output.rid] += [time.perf_counter()] * len(output.token_ids)
    jax.block_until_ready(jax.live_arrays())
    return _Answers(tokens, times, time.perf_counter() - begin)


def _prompts(part: Part, load: Load, seed: int) -> list[tuple[int, ...]]:
    """Random prompts, which depend only on the seed."""
    vocabulary, generator = range(part.plan.shape["vocab_size"]), random.Random(seed)
    shared = tuple(generator.choices(vocabulary, k=load.shared_len))
    return [shared + tuple(generator.choices(vocabulary, k=load.own_len)) for _ in range(load.num_requests)]


def _greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)


def _plain_rows(buckets: Buckets) -> set[int]:
    """The numbers of rows for steps without a grammar. Steps with drafts always have one."""
    return {key.num_rows for key in buckets.all if key not in buckets.drafts}
