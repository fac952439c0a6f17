"""What one step costs on this device, beside what it could cost at best: `python -m bench.device`.

One script for whatever JAX finds. An accelerator is measured at the shape of Llama 3 8B in bfloat16, with fewer layers
where that does not fit; a CPU at a 100M shape in float32. Weights are random: nothing is read or downloaded. Needs jax,
flax, numpy and jaxtyping only. In this order, each figure written to the file as soon as it is known:

    rates       copy bandwidth and matmul rate, from which every floor follows
    attention   the device's implementation against float64 on the host
    decode      the bare step, forward and sample, for 1, 32 and 256 rows
    prefill     the bare step for one prompt
    engine      a short greedy generation through the whole engine, in a batch and alone
    torch       matmul and attention of PyTorch, where the same interpreter has it
"""

import argparse
import dataclasses
import datetime
import gc
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import attention_check, roofline
from bench import report as reporting
from bench.bare import BareStep, Work
from bench.clock import sample_until
from bench.shapes import LLAMA_8B, LLAMA_100M, LLAMA_SMALL, write_model
from bench.torch_peer import measure_torch
from jsg.config import EngineConfig
from jsg.engine.core import EngineCore
from jsg.models.config import ModelConfig
from jsg.sched.buckets import BucketKey, Phase
from jsg.types import Request, SamplingParams

QUEUED_STEPS = 10
FIT_FRACTION = 0.8
"""Weights and pool together, of the device's memory; the rest is for temporaries and logits."""
MAX_ERROR = {"float32": 5e-3, "bfloat16": 5e-2}
"""Of attention over unit normal values; an accelerator may multiply float32 in a shorter type."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured on this kind of device."""

    shape: dict[str, Any]
    dtype: str
    batches: tuple[int, ...]
    context: int
    prefills: tuple[int, ...]
    copy_bytes: int
    matmul_size: int

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def pool_tokens(self) -> int:
        """KV slots for the largest batch and the longest prefill."""
        return max(max(self.batches) * (self.context + 1), *self.prefills)


ACCELERATOR = Plan(LLAMA_8B, "bfloat16", (1, 32, 256), 1024, (1024, 2048, 4096, 8192), 2**30, 8192)
CPU = Plan(LLAMA_100M, "float32", (1, 32, 256), 256, (256, 1024), 2**28, 2048)
TRIAL = Plan(LLAMA_SMALL, "float32", (1, 4), 16, (64,), 2**20, 128)
PLANS = {"8b": ACCELERATOR, "100m": CPU, "trial": TRIAL}


@dataclasses.dataclass(frozen=True)
class Bench:
    """What the parts share. `deadline` is on the monotonic clock: parts that have not begun by then are left out."""

    report: reporting.Report
    plan: Plan
    config: ModelConfig
    samples: int
    budget_s: float
    deadline: float

    def time(self, run: Callable[[], object]) -> list[float]:
        """Milliseconds of each call, after warm-up."""
        return sample_until(run, count=self.samples, warm_up=5, budget_s=self.budget_s)

    @property
    def is_late(self) -> bool:
        """Whether no further figure may begin."""
        return time.monotonic() > self.deadline


def measure_rates(bench: Bench) -> roofline.Rates:
    """The best of several: the floor is what the device can do undisturbed."""
    copies = bench.report.add("copy bandwidth", "GB/s", roofline.copy_rates(bench.plan.copy_bytes))
    matmuls = bench.report.add(
        f"matmul {bench.plan.matmul_size}^3 {bench.plan.dtype}",
        "TFLOP/s",
        roofline.matmul_rates(bench.plan.matmul_size, bench.plan.dtype),
    )
    return roofline.Rates(max(copies.samples) * 1e9, max(matmuls.samples) * 1e12)


def check_attention(bench: Bench) -> None:
    """Raises ArithmeticError, after all were noted, where one is further off than rounding explains."""
    shape = bench.plan.shape
    sizes = {"heads": shape["num_attention_heads"], "kv_heads": shape["num_key_value_heads"]}
    wrong = []
    for dtype in dict.fromkeys(("float32", bench.plan.dtype)):
        for batch in attention_check.BATCHES:
            error = attention_check.largest_error(batch, dtype, head_dim=shape["head_dim"], **sizes)
            bench.report.add(f"attention error, {batch.name}, {dtype}", "abs", [error], at_most=MAX_ERROR[dtype])
            wrong += [f"{batch.name} in {dtype}"] * (not error <= MAX_ERROR[dtype])
    if wrong:
        raise ArithmeticError(f"attention is wrong on this device: {', '.join(wrong)}")


def measure_steps(bench: Bench, rates: roofline.Rates) -> None:
    """Decode and prefill of one model; its memory is free again afterwards."""
    plan = bench.plan
    begin = time.monotonic()
    bare = BareStep(
        bench.config,
        jnp.dtype(plan.dtype),
        max_rows=max(plan.batches),
        context_len=max(plan.context + 1, *plan.prefills),
        pool_tokens=plan.pool_tokens,
    )
    print(f"model of {bare.weight_bytes / 1e9:.2f} GB ready after {time.monotonic() - begin:.0f} s", flush=True)
    for batch in plan.batches:
        if not bench.is_late:
            work = bare.prepare(BucketKey(Phase.DECODE, batch, batch), [(plan.context, 1)] * batch)
            cost = roofline.step_cost(bench.config, plan.itemsize, rows=batch, cached=plan.context, new=1)
            _measure_step(bench, f"decode B={batch} ctx {plan.context}", bare, work, cost.floor_ms(rates), batch)
    for length in plan.prefills:
        if not bench.is_late:
            work = bare.prepare(BucketKey(Phase.EXTEND, length, 8), [(0, length)])
            cost = roofline.step_cost(bench.config, plan.itemsize, rows=1, cached=0, new=length)
            _measure_step(bench, f"prefill T={length}", bare, work, cost.floor_ms(rates), length)


def _measure_step(bench: Bench, name: str, bare: BareStep, work: Work, floor_ms: float, num_tokens: int) -> None:
    """Steps that are waited for one by one, then several that are queued behind each other as the engine does."""
    samples = bench.time(lambda: bare.run(work))
    start = time.perf_counter()
    num_queued = QUEUED_STEPS if min(samples) * QUEUED_STEPS < bench.budget_s * 1e3 else 1
    queued = [bare.dispatch(work) for _ in range(num_queued)]
    queued[-1].block_until_ready()
    queued_ms = (time.perf_counter() - start) * 1e3 / num_queued
    best_ms = min(min(samples), queued_ms)
    bench.report.add(
        name,
        "ms",
        samples,
        queued_ms=queued_ms,
        floor_ms=floor_ms,
        times_floor=best_ms / floor_ms,
        tokens_per_s=num_tokens / best_ms * 1e3,
        **bare.planned_mib(work),
    )


def generate(bench: Bench) -> None:
    """The same prompts in one batch and one by one. In bfloat16 both need not agree; how often is what is noted."""
    with tempfile.TemporaryDirectory() as folder:
        core = EngineCore(
            EngineConfig(
                model_path=str(write_model(Path(folder), LLAMA_SMALL)),
                load_format="dummy",
                context_length=128,
                max_running_requests=4,
                max_total_tokens=2048,
                chunked_prefill_size=64,
                disable_compilation_cache=True,
            )
        )
        prompts = [tuple(range(start, start + 20)) for start in range(1, 9)]
        together = _answers(core, prompts)
        core.flush_cache()
        alone = [_answers(core, [prompt])[0] for prompt in prompts]
        core.check_integrity()
        core.close()
    equal = sum(a == b for left, right in zip(together, alone, strict=True) for a, b in zip(left, right, strict=True))
    rate = equal / sum(map(len, together))
    bench.report.add("greedy tokens equal in a batch and alone", "fraction", [rate], answer=list(together[0]))


def _answers(core: EngineCore, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    sampling = SamplingParams(max_new_tokens=16, temperature=0.0, ignore_eos=True)
    tokens: dict[str, tuple[int, ...]] = {}
    for index, prompt in enumerate(prompts):
        core.add(Request(rid=str(index), input_ids=prompt, sampling=sampling))
    while core.has_work:
        for output in core.step():
            tokens[output.rid] = tokens.get(output.rid, ()) + output.token_ids
    return [tokens[str(index)] for index in range(len(prompts))]


def memory_bytes(device: Any) -> int | None:
    """What JAX may use of the device; None where it does not say."""
    return (device.memory_stats() or {}).get("bytes_limit")


def fit(plan: Plan, limit_bytes: int | None) -> Plan:
    """The plan with as many layers as fit into the memory of the device."""
    if limit_bytes is None:
        return plan
    shape = plan.shape
    width, head_dim = shape["hidden_size"], shape["head_dim"]
    attention = 2 * head_dim * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    weights_of_layer = plan.itemsize * width * (attention + 3 * shape["intermediate_size"])
    pool_of_layer = plan.itemsize * plan.pool_tokens * 2 * shape["num_key_value_heads"] * head_dim
    left = FIT_FRACTION * limit_bytes - 2 * plan.itemsize * width * shape["vocab_size"]
    layers = min(shape["num_hidden_layers"], max(1, int(left / (weights_of_layer + pool_of_layer))))
    return dataclasses.replace(plan, shape=shape | {"num_hidden_layers": layers})


def main(arguments: Sequence[str]) -> None:
    begin = time.monotonic()
    options = _options(arguments)
    device = jax.devices()[0]
    limit = memory_bytes(device)
    plan = fit(PLANS[options.plan or ("100m" if device.platform == "cpu" else "8b")], limit)
    today = datetime.datetime.now(datetime.UTC).date()
    slug = re.sub(r"[^a-z0-9]+", "-", f"{device.device_kind}".lower()).strip("-")
    report = reporting.Report(
        "bench.device",
        arguments,
        options.output or reporting.ROOT / "bench" / "results" / f"{slug}-{today}.json",
        devices=[str(each) for each in jax.devices()],
        device_kind=device.device_kind,
        platform_version=device.client.platform_version,
        memory_bytes=limit,
        shape=plan.shape,
        dtype=plan.dtype,
        kv_pool_tokens=plan.pool_tokens,
        unmeasured=[],
    )
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_directory(write_model(Path(folder), plan.shape))
    bench = Bench(report, plan, config, options.samples, options.budget_s, begin + options.deadline_s)
    rates = measure_rates(bench)
    parts: list[Callable[[], object]] = [
        lambda: check_attention(bench),
        lambda: measure_steps(bench, rates),
        lambda: generate(bench),
        lambda: measure_torch(report, plan.dtype, plan.matmul_size),
    ]
    failed = run_parts(bench, parts)
    report.header["memory_stats"] = {k: v for k, v in (device.memory_stats() or {}).items() if isinstance(v, int)}
    report.close()
    raise SystemExit(failed)


def run_parts(bench: Bench, parts: Sequence[Callable[[], object]]) -> int:
    """Runs every part, whatever happens to the others; returns how many failed. Failures are in the report."""
    failed = 0
    for part in parts:
        try:
            part()
        except Exception as error:  # one part's failure must not cost the figures of the others
            failed += 1
            lines = str(error).splitlines() or [""]
            bench.report.header["unmeasured"].append(f"{type(error).__name__}: {lines[0][:500]}")
            print(f"a part failed: {bench.report.header['unmeasured'][-1]}", flush=True)
        gc.collect()
    return failed


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", choices=sorted(PLANS), help="model; default: 8b on an accelerator, 100m on a CPU")
    parser.add_argument("--samples", type=int, default=20, help="timed calls of each step, after 5 others")
    parser.add_argument("--budget-s", type=float, default=30.0, help="seconds for one figure; then samples are fewer")
    parser.add_argument("--deadline-s", type=float, default=360.0, help="seconds after which no figure is begun")
    parser.add_argument("--output", type=Path, help="JSON file; default: bench/results/<device>-<date>.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
