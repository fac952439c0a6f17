"""The bare step, which is its two programs without the engine, beside its least possible time."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from bench import roofline
from bench.bare import BareStep, Work
from bench.device.catalogue import PARTS, Entry
from bench.device.events import Part
from bench.device.plan import Plan
from bench.device.queued import options
from jsg.engine.shapes import ROW_MULTIPLE
from jsg.kernels_pallas.tile import MIN_GROUP
from jsg.models.config import read_spec
from jsg.sched.buckets import BucketKey, Phase

QUEUED_STEPS = 10
"""The number of steps that are timed together. They are started without waiting for each other, as in the engine."""


def measure(part: Part) -> None:
    """Measures prefill and decode of one model, then decode over one prefix that all rows share."""
    plan = part.plan
    bare = make_bare(part, plan)
    for rows in plan.batches:
        part.attempt(f"decode B={rows}", functools.partial(_decode, part, bare, rows, kind="decode"))
    for length in plan.prefills:
        part.attempt(f"prefill T={length}", functools.partial(_prefill, part, bare, length))
    bare.share_prefix(plan.shared_context)
    for shares in (False, True) if jax.default_backend() != "tpu" else (False,):  # no kernel reads it once there
        rows = max(plan.batches)
        name = f"decode B={rows} with a shared prefix, {'read once' if shares else 'read by each'}"
        part.attempt(name, functools.partial(_decode_shared, part, bare, name, rows, shares=shares))


def compare(part: Part) -> None:
    """Measures a few layers, to compare compiler options. The whole model would take too long to start for each."""
    plan = part.plan.with_layers(min(part.plan.ab_layers, part.plan.shape["num_hidden_layers"]))
    bare = make_bare(part, plan)
    for rows in (min(plan.batches), max(plan.batches)):
        part.attempt(f"decode B={rows}", functools.partial(_decode, part, bare, rows, kind="compare", plan=plan))


def make_bare(part: Part, plan: Plan) -> BareStep:
    """A model on the device. The time of its start goes to the report's header."""
    begin = time.monotonic()
    bare = BareStep(
        read_spec(part.model_directory(plan)),
        jnp.dtype(plan.dtype),
        max_rows=max(plan.batches),
        context_len=max(plan.context + 1, *plan.prefills),
        pool_tokens=plan.pool_tokens,
        page_size=plan.page_sizes[0],
        compiler_options=_options(PARTS[part.name]),
    )
    part.header(weight_gb=round(bare.weight_bytes / 1e9, 3), weights_s=round(time.monotonic() - begin, 1))
    return bare


def _options(entry: Entry) -> dict[str, Any] | None:
    """XLA's options for a part; None for the engine's."""
    if not entry.has_engine_options:
        return {}
    return (options() or {}) | dict(entry.xla_options) if entry.xla_options and jax.default_backend() == "gpu" else None


def padded(rows: int) -> int:
    """The number of rows of the shape in which the engine would run this many requests."""
    multiple = ROW_MULTIPLE.get(jax.default_backend(), 1)
    return -(-rows // multiple) * multiple


def _decode(part: Part, bare: BareStep, rows: int, *, kind: str, plan: Plan | None = None) -> None:
    plan = plan or part.plan
    bucket = padded(rows)
    work = bare.prepare(BucketKey(Phase.DECODE, bucket, bucket), [(plan.context, 1)] * rows)
    cost = roofline.step_cost(bare.config, plan.itemsize, rows=rows, cached=plan.context, new=1)
    name = f"decode B={rows} ctx {plan.context}"
    if bucket > rows:
        name += f" in the shape of {bucket} rows"
    if kind == "compare":
        name += f", {plan.shape['num_hidden_layers']} layers, {part.name}"
    facts = {"rows": rows, "bucket": bucket, "context": plan.context}
    _measure_step(part, name, bare, work, cost, rows, kind=kind, **facts)


def _decode_shared(part: Part, bare: BareStep, name: str, rows: int, *, shares: bool) -> None:
    plan = part.plan
    bucket = padded(rows)
    num_groups = max(bucket // MIN_GROUP, 1) if shares else 0
    work = bare.prepare(BucketKey(Phase.DECODE, bucket, bucket, num_groups), [(plan.context, 1)] * rows)
    cost = roofline.step_cost(bare.config, plan.itemsize, rows=rows, cached=plan.context, new=1)
    # Either way the prefix must come from memory only once, because caches may keep it for later reads.
    saved = (rows - 1) * plan.shared_context * bare.config.kv_bytes_per_token(plan.itemsize)
    cost = dataclasses.replace(cost, kv_bytes=cost.kv_bytes - saved)
    facts = {"rows": rows, "context": plan.context, "shared": plan.shared_context, "shares": shares}
    _measure_step(part, name, bare, work, cost, rows, kind="decode-shared", **facts)


def _prefill(part: Part, bare: BareStep, length: int) -> None:
    work = bare.prepare(BucketKey(Phase.EXTEND, length, 8), [(0, length)])
    cost = roofline.step_cost(bare.config, part.plan.itemsize, rows=1, cached=0, new=length)
    _measure_step(part, f"prefill T={length}", bare, work, cost, length, kind="prefill", length=length)


def _measure_step(
    part: Part, name: str, bare: BareStep, work: Work, cost: roofline.Cost, num_tokens: int, **facts: Any
) -> None:
    """Measures milliseconds of a step in a queue of several and, as a fact beside it, of a step that is waited for."""
    waited = part.time(lambda: bare.run(work), budget_s=2)
    num_queued = QUEUED_STEPS if min(waited) < 1e3 else 1

    def queued() -> None:
        outputs = [bare.dispatch(work) for _ in range(num_queued)]
        outputs[-1].block_until_ready()

    samples = [ms / num_queued for ms in part.time(queued, budget_s=5)]
    best_ms = min(samples)
    facts |= {"tokens_per_s": num_tokens / best_ms * 1e3, "waited_ms": min(waited)}
    facts |= {"num_bytes": cost.num_bytes, "num_flops": cost.num_flops}
    if part.rates is not None:
        floor_ms = cost.floor_ms(roofline.Rates(*part.rates))
        facts |= {"floor": floor_ms, "of_floor": floor_ms / best_ms, "floor_tokens_per_s": num_tokens / floor_ms * 1e3}
    part.add(name, "ms", samples, **facts, **bare.planned_mib(work))
