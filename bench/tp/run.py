"""The run of `bench.tp`: it compiles, counts, and calculates times and free memory."""

import argparse
import dataclasses
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from bench.device.shapes import LLAMA_70B, MIXTRAL_8X7B
from bench.nvidia import programs as h200
from bench.nvidia.compiler import memory_of
from bench.report import Report
from bench.roofline import Rates, step_cost
from bench.shapes import LLAMA_8B
from bench.tp.compiled import collectives
from bench.tp.interconnect import Collective
from jsg.config import EngineConfig
from jsg.engine.device.memory import MemoryPlan, largest_step_bytes, plan_memory
from jsg.engine.device.programs import EVERYTHING, GREEDY
from jsg.errors import MemoryPlanError
from jsg.models.loading import abstract_model
from jsg.models.quantise import BYTES_PER_NUMBER
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import bytes_on_one_device
from jsg.sched.buckets import BucketKey, Phase

COUNTS = (1, 2, 4, 8)
RATES = Rates(copy_bytes_per_s=4.3e12, matmul_flops_per_s=790e12)
"""The rates that a copy and a large bfloat16 product reach on an H200, of 4.8 TB/s and 990 TFLOP/s."""
USABLE_BYTES = int(0.85 * 139 * 2**30)
"""The bytes of one H200 that the engine uses by the default of `--mem-fraction-static`."""
POOL_TOKENS = 100_000  # only the shape that is compiled; the number that fits is calculated
ITEM_BYTES = jnp.bfloat16.dtype.itemsize


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """A model, and how devices share it.

    Attributes:
        shape: Its `config.json`.
        quantization: The type of its kernels (`--quantization`).
        has_own_experts: Whether each device has some complete experts (`--ep-size` is `--tp-size`), or columns of all.
    """

    shape: dict[str, Any]
    quantization: str = "none"
    has_own_experts: bool = False

    def num_groups(self, num_devices: int) -> int:
        """`--ep-size` on this number of devices."""
        return num_devices if self.has_own_experts else 1


MODELS = {
    "Llama-8B": Served(LLAMA_8B),
    "Llama-70B": Served(LLAMA_70B),
    "Llama-70B in int8": Served(LLAMA_70B, quantization="int8"),
    "Mixtral-8x7B": Served(MIXTRAL_8X7B),
    "Mixtral-8x7B by experts": Served(MIXTRAL_8X7B, has_own_experts=True),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The shape of a step, and a load that fills it: new tokens of a number of requests behind cached tokens."""

    name: str
    key: BucketKey
    rows: int
    cached: int
    new: int


STEPS = (
    Step("decode, 1 request of 1024", BucketKey(Phase.DECODE, 8, 8), 1, 1023, 1),
    Step("decode, 32 requests of 1024", BucketKey(Phase.DECODE, 32, 32), 32, 1023, 1),
    Step("decode, 256 requests of 1024", BucketKey(Phase.DECODE, 256, 256), 256, 1023, 1),
    Step("prefill, 8 of 1024", BucketKey(Phase.EXTEND, 8192, 256), 8, 0, 1024),
)


def measure(report: Report, name: str, num_devices: int) -> None:
    """Measures one model on this number of devices."""
    served, quantization = MODELS[name], MODELS[name].quantization
    num_groups = served.num_groups(num_devices)
    model = h200.make_model(
        served.shape,
        quantization=quantization,
        pool_tokens=POOL_TOKENS,
        num_devices=num_devices,
        num_groups=num_groups,
    )
    kernel_bytes = BYTES_PER_NUMBER.get(quantization, ITEM_BYTES)
    config = model.config
    for step in STEPS:
        program = model.programs.program(("forward", step.key))
        sampling = model.programs.program(("sample", step.key.num_rows, GREEDY))
        found = [*collectives(program.hlo), *collectives(sampling.hlo)]
        cost = step_cost(
            config,
            ITEM_BYTES,
            rows=step.rows,
            cached=step.cached,
            new=step.new,
            kernel_itemsize=kernel_bytes,
            num_devices=num_devices,
            num_groups=num_groups,
        )
        check(config, step, found, num_devices)
        floor_ms = cost.floor_ms(RATES)
        times = [1e3 * sum(each) for each in zip(*(c.seconds(num_devices) for c in found), strict=True)] or [0.0, 0.0]
        two_hosts = [
            1e3 * sum(each) for each in zip(*(c.seconds_on_two_hosts(num_devices) for c in found), strict=True)
        ]
        report.add(
            f"{name}, {num_devices} devices: {step.name}",
            "ms",
            [floor_ms + each for each in times],
            on_two_hosts_ms=[round(floor_ms + each, 3) for each in two_hosts],
            kind="step",
            model=name,
            devices=num_devices,
            step=step.name,
            floor_ms=round(floor_ms, 3),
            weight_gb=round(cost.weight_bytes / 1e9, 3),
            collectives={f"{c.kind} of {c.num_bytes}": c.count for c in found},
            exchanged_bytes=sum(c.num_bytes * c.count for c in found),
            temporary_bytes=program.temporary_bytes,
        )
    declared = abstract_model(config, jnp.bfloat16, quantization, model.programs.mesh)
    weights = sum(map(bytes_on_one_device, jax.tree.leaves(nnx.state(declared))))  # as the engine plans them
    plan = memory_plan(model, weights, num_devices)
    report.add(
        f"{name}, {num_devices} devices: weights of one",
        "GB",
        [weights / 1e9],
        kind="memory",
        model=name,
        devices=num_devices,
        step_gb=round(plan.temporary_bytes / 1e9, 2) if plan else 0,
        kv_tokens=plan.pool_tokens if plan else 0,
    )


def memory_plan(model: h200.Model, weights: int, num_devices: int) -> MemoryPlan | None:
    """The engine's memory plan on an H200, from the largest program of each kind; None if nothing fits."""
    config, key = model.config, h200.BUCKETS.extend[-1]
    most_rows = max(key.num_rows for key in h200.BUCKETS.all)
    names = [("forward", key), ("sample", most_rows, EVERYTHING), ("prompt_logprobs", key.num_tokens)]
    programs = [model.programs.program(name).compiled for name in names]
    given = memory_of(programs[0]).argument_size_in_bytes - model.donated_bytes // num_devices
    assert abs(given / weights - 1) < 0.01, "the program is given the weights that are planned"
    try:
        return plan_memory(
            EngineConfig(),
            config,
            platform="gpu",
            limit_bytes=USABLE_BYTES,
            page_size=1,
            kv_itemsize=ITEM_BYTES,
            weights_bytes=weights,
            temporary_bytes=largest_step_bytes(programs, h200.BUCKETS, config),
            max_running=h200.MAX_RUNNING,
            context_length=config.max_position_embeddings,
            chunk=h200.BUCKETS.chunk,
            num_devices=num_devices,
        )
    except MemoryPlanError:
        return None


def check(config: ModelSpec, step: Step, found: list[Collective], num_devices: int) -> None:
    """Checks that the programs exchange what the calculation assumes. Raises AssertionError."""
    size = step.key.num_tokens * config.hidden_size * ITEM_BYTES
    sums = [Collective("all-reduce", size, 2 * config.num_layers + 1)] if num_devices > 1 else []
    pairs = [Collective("all-gather", 8 * num_devices * step.key.num_rows)] if num_devices > 1 else []
    assert found == sums + pairs, found


def main() -> None:
    arguments = sys.argv[1:]
    parser = argparse.ArgumentParser(prog="python -m bench.tp", description=__doc__)
    parser.add_argument("--model", choices=MODELS, help="measure only this model")
    parser.add_argument("--devices", type=int, choices=COUNTS, help="measure only this number of devices")
    parser.add_argument("--output", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    report = Report("bench.tp", arguments, options.output, device="none: compiled for H200s, times are modelled")
    for name, count in chosen(options):
        measure(report, name, count)
        jax.clear_caches()
        gc.collect()
    report.close()


def chosen(options: Any) -> Iterator[tuple[str, int]]:
    """The models and numbers of devices to measure. A model that needs several devices is measured only on these."""
    for name in [options.model] if options.model else MODELS:
        for count in [options.devices] if options.devices else COUNTS:
            if count > 1 or not MODELS[name].has_own_experts:
                yield name, count
