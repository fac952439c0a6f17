"""The memory plan: what fits, what is refused, and its messages."""

import dataclasses
import pathlib
from collections.abc import Hashable, Iterable
from typing import Any
from unittest import mock

import jax
import pytest

from jsg.config import EngineConfig
from jsg.engine import startup
from jsg.engine.device import memory
from jsg.engine.device.devices import Device, Gpu
from jsg.engine.device.executables import Executables
from jsg.engine.device.memory import MemoryPlan, plan_memory
from jsg.engine.device.programs import DRAWN, GREEDY, SAMPLED, Programs
from jsg.errors import ConfigError, MemoryPlanError
from jsg.models.config import read_spec
from jsg.models.spec import ModelSpec
from jsg.sched.buckets import BucketKey, Phase
from tests.engine import small
from tests.models.specs import changed

MIB, GIB = 2**20, 2**30


@pytest.fixture
def model(small_model: pathlib.Path) -> ModelSpec:
    return changed(read_spec(small_model), attention={"heads": 8, "kv_heads": 8, "head_dim": 128}, copies=16)


def plan(
    model: ModelSpec,
    platform: str = "gpu",
    *,
    weights: int = 16 * GIB,
    page_size: int = 1,
    kv_itemsize: int = 2,
    total: int = 140 * GIB,
    bytes_per_state: int = 0,
    num_devices: int = 1,
    code: int = 0,
    **knobs: object,
) -> MemoryPlan:
    return plan_memory(
        EngineConfig(**knobs),  # pyright: ignore[reportArgumentType]
        model,
        platform=platform,
        limit_bytes=int(EngineConfig(**knobs).mem_fraction_static * total),  # pyright: ignore[reportArgumentType]
        page_size=page_size,
        kv_itemsize=kv_itemsize,
        weights_bytes=weights,
        temporary_bytes=GIB,
        code_bytes=code,
        max_running=256,
        context_length=8192,
        chunk=8192,
        bytes_per_state=bytes_per_state,
        num_devices=num_devices,
    )


def test_the_pool_takes_what_is_left(model: ModelSpec):
    made = plan(model, mem_fraction_static=0.9)
    used = made.weights_bytes + made.temporary_bytes + made.table_bytes + made.pool_tokens * made.bytes_per_token
    used += made.reserve_bytes
    assert made.bytes_per_token == 128 * 1024
    assert made.limit_bytes - 2 * made.bytes_per_token <= used <= made.limit_bytes
    assert f"{made.pool_tokens} tokens" in str(made)


def test_the_pool_is_no_larger_than_its_requests_could_use(model: ModelSpec):
    assert plan(dataclasses.replace(model, layers=model.layers[:1])).pool_tokens == 256 * 8192


def test_a_pool_of_eight_bits_is_no_larger_than_the_kernels_offsets_reach(model: ModelSpec):
    small_layers = changed(model, attention={"heads": 16, "kv_heads": 16})
    small_layers = dataclasses.replace(small_layers, layers=small_layers.layers[:8])
    made = plan(small_layers, kv_itemsize=1, page_size=16)
    assert made.pool_tokens + 16 == 2**31 // (16 * 128), "page 0 is in the pool too"
    assert plan(small_layers, kv_itemsize=2, page_size=16).pool_tokens > made.pool_tokens
    with pytest.raises(MemoryPlanError, match="memory is left for"):
        plan(small_layers, kv_itemsize=1, page_size=16, max_total_tokens=made.pool_tokens + 1)


def test_the_code_of_programs_is_a_part_of_its_own(model: ModelSpec):
    without, made = plan(model, "tpu"), plan(model, "tpu", code=2 * GIB)
    assert "programs" not in str(without) and " + programs 2048 MiB + " in str(made)
    assert without.pool_tokens - made.pool_tokens == 2 * GIB // made.bytes_per_token


def test_code_is_estimated_from_programs_of_the_same_kind():
    def forward(phase: Phase, size: int) -> Hashable:
        return ("forward", BucketKey(phase, size, size))

    sizes = {
        forward(Phase.DECODE, 8): 2 * MIB,
        forward(Phase.DECODE, 64): 6 * MIB,
        forward(Phase.EXTEND, 64): 30 * MIB,
        ("sample", 64, GREEDY): MIB,
        ("sample", 64, SAMPLED): 5 * MIB,
        ("write_rows", 1): MIB,
    }
    programs: Any = {name: compiled(size) for name, size in sizes.items()}
    estimated = {
        forward(Phase.DECODE, 16): 4 * MIB,  # between the smallest and the largest
        forward(Phase.EXTEND, 512): 30 * MIB,
        ("sample", 8, GREEDY): MIB,
        ("sample", 8, DRAWN): 3 * MIB,  # of no variant that is compiled: as much as sampling on average
        ("write_rows", 8): MIB,
        ("copy_slots",): 0,  # nobody knows
    }
    total = sum(sizes.values()) + sum(estimated.values())
    assert memory.total_code_bytes(programs, [*sizes, *estimated, *estimated]) == total
    assert memory.total_code_bytes({("copy_slots",): mock.Mock(memory_analysis=lambda: None)}, [("copy_slots",)]) == 0


def compiled(code: int) -> mock.Mock:
    """A compiled program of which only the memory analysis is asked for."""
    sizes = {"output_size_in_bytes": 0, "alias_size_in_bytes": 0, "temp_size_in_bytes": MIB}
    return mock.Mock(memory_analysis=lambda: mock.Mock(generated_code_size_in_bytes=code, **sizes))


@pytest.mark.parametrize("platform", ["tpu", "cpu"])
def test_a_tpu_plans_the_code_of_programs_of_which_few_are_compiled(
    small_model: pathlib.Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch, platform: str
):
    """Nothing is compiled here: each program has a mebibyte of code."""

    class Sized(Executables):
        def output_shape(self, name: Hashable) -> Any:
            return None, jax.ShapeDtypeStruct((64, 32), "float32")

        def compile(self, names: Iterable[Hashable], report: object = None) -> None:
            asked.append(list(names))

        def compiled(self, name: Hashable) -> Any:
            assert name in asked[-1]
            return compiled(MIB)

    asked: list[list[Hashable]] = []
    settings = startup.begin(small.make_config(small_model, compile_cache_dir, page_size=16), lambda progress: None)
    settings = dataclasses.replace(settings, device=dataclasses.replace(settings.device, platform=platform))
    monkeypatch.setattr(startup, "usable_bytes", lambda *args: GIB)
    executables = startup.make_executables(settings, Sized)
    made = startup.make_plan(settings, executables)
    assert len(asked) == 1, "the pool has the size that was asked for"
    assert "page size 16 (prefixes are found 8 tokens shorter on average; --page-size lowers it); st" in str(settings)
    assert "page size 1; steps" in str(dataclasses.replace(settings, page_size=1))
    model = startup.abstract_model_of(settings)
    programs = Programs(model, settings.runner_config(), settings.abstract_state(made), settings.buckets, executables)
    assert made.parts.get("programs", 0) == (len(set(programs.names)) * MIB if platform == "tpu" else 0)
    assert (len(asked[0]) < len(set(programs.names))) and (set(programs.usual()) <= set(asked[0])) == (
        platform == "tpu"
    )


def test_xla_is_not_asked_for_programs_that_fill_a_tpu(
    small_model: pathlib.Path, compile_cache_dir: str, monkeypatch: pytest.MonkeyPatch
):
    """It counts the pool as memory that a program needs, and the size of temporaries is not known yet."""
    pools: list[int] = []

    def measured(*args: Any) -> tuple[int, int]:
        pools.append(args[-1].pool_tokens)
        return GIB // 4, GIB // 4

    monkeypatch.setattr(startup, "_measured", measured)
    monkeypatch.setattr(startup, "usable_bytes", lambda *args: GIB)
    config = small.make_config(small_model, compile_cache_dir, max_total_tokens=None, max_running_requests=32)
    settings = startup.begin(config, lambda progress: None)
    settings = dataclasses.replace(settings, device=dataclasses.replace(settings.device, platform="tpu"))
    made = startup.make_plan(settings, startup.make_executables(settings, Executables))
    assert pools == [small.CONTEXT, made.pool_tokens] and made.pool_tokens > small.CONTEXT
    assert made.temporary_bytes == made.code_bytes == GIB // 4


ADVICE = "; --quantization int8 would leave the KV pool twice as much or more"


@pytest.mark.parametrize(
    ("platform", "knobs", "is_advised"),
    [
        ("gpu", {"total": 24 * GIB}, True),
        ("gpu", {}, False),  # a card of 140 GiB has room for both
        ("gpu", {"total": 24 * GIB, "quantization": "int8"}, False),
        ("gpu", {"total": 24 * GIB, "max_total_tokens": 8192}, False),  # nobody asks for more
        ("cpu", {"total": 24 * GIB}, False),
    ],
)
def test_8_bits_are_recommended_where_bfloat16_leaves_little(
    model: ModelSpec, platform: str, knobs: dict, is_advised: bool
):
    assert str(plan(model, platform, weights=15 * GIB, **knobs)).endswith(ADVICE) == is_advised


def test_8_bits_are_recommended_where_bfloat16_leaves_nothing(model: ModelSpec):
    with pytest.raises(MemoryPlanError, match=ADVICE):
        plan(model, weights=20 * GIB, total=24 * GIB)


@pytest.mark.parametrize(
    ("per_state", "platform", "knobs", "expected"),
    [
        (8 * MIB, "gpu", {}, 512),  # two for each of 256 requests
        (64 * MIB, "gpu", {"total": 80 * GIB}, 202),  # a quarter of what weights and reserve leave
        (64 * MIB, "gpu", {"total": 80 * GIB, "num_devices": 2}, 405),  # each has half of the heads
        (64 * MIB, "gpu", {"max_states": 100}, 100),
        (64 * MIB, "gpu", {"max_states": 0}, 0),
        (64 * MIB, "gpu", {"max_states": 100, "disable_radix_cache": True}, 0),
        (64 * MIB, "gpu", {"disable_radix_cache": True}, 0),
        (16 * MIB, "cpu", {}, 16),  # a quarter of a KV pool's gibibyte
        (100 * MIB, "cpu", {}, 8),  # no fewer
        (0, "gpu", {}, 0),
        (0, "gpu", {"max_states": 0}, 0),
    ],
)
def test_some_states_of_prefixes_are_kept(
    model: ModelSpec, per_state: int, platform: str, knobs: dict[str, Any], expected: int
):
    made = plan(model, platform, bytes_per_state=per_state, **knobs)
    of_device = per_state // knobs.get("num_devices", 1)
    assert (made.num_states, made.bytes_per_state) == (expected, of_device)
    assert made.num_slots == 1 + 256 + expected
    assert made.parts.get("states", 0) == (1 + 256 + expected) * of_device
    tokens = of_device // made.bytes_per_token
    said = f"; {expected} states of prefixes, each as large as {tokens} tokens)"
    assert (said in str(made)) == bool(per_state)


def test_states_that_do_not_fit_or_that_no_layer_has_are_refused(model: ModelSpec):
    with pytest.raises(MemoryPlanError, match=r"lower --context-length .* or --max-states"):
        plan(model, bytes_per_state=64 * MIB, max_states=5000)
    with pytest.raises(ConfigError, match="--max-states needs a model with"):
        plan(model, max_states=1)


def test_the_pool_is_modest_on_a_cpu(model: ModelSpec):
    made = plan(model, "cpu")
    assert made.pool_tokens * made.bytes_per_token <= memory.CPU_POOL_BYTES


def test_the_pool_is_whole_pages(model: ModelSpec):
    assert plan(model, page_size=64, max_total_tokens=10_000).pool_tokens == 10_048


@pytest.mark.parametrize("knobs", [{"weights": 130 * GIB}, {"max_total_tokens": 2**24}, {"mem_fraction_static": 0.1}])
def test_what_does_not_fit_is_refused_with_the_plan(model: ModelSpec, knobs: dict):
    with pytest.raises(MemoryPlanError, match=r"memory is left for .*--mem-fraction-static.*memory plan"):
        plan(model, **knobs)


def test_a_context_longer_than_the_model_is_refused(small_model: pathlib.Path, compile_cache_dir: str):
    with pytest.raises(ConfigError, match="256"):
        small.make_core(small_model, compile_cache_dir, context_length=10_000)


class TestUsableBytes:
    """The memory that JAX reserved counts, and never more of a GPU than was asked for."""

    @pytest.fixture(autouse=True)
    def reserved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Accelerator:
            def memory_stats(self) -> dict[str, int]:
                return {"bytes_limit": 100 * GIB}

        monkeypatch.setattr(jax, "local_devices", lambda: [Accelerator()])

    @pytest.mark.parametrize(
        ("platform", "total", "mem_fraction", "expected"),
        [
            ("gpu", 140 * GIB, 0.85, 100 * GIB),  # others hold the rest
            ("gpu", 140 * GIB, 0.5, 70 * GIB),  # JAX had started before, with more
            ("gpu", None, 0.5, 100 * GIB),  # nobody knows how much there is
            ("tpu", None, 0.5, 50 * GIB),
        ],
    )
    def test_of_an_accelerator(self, platform: str, total: int | None, mem_fraction: float, expected: int):
        gpu = None if total is None else Gpu(0, "GPU-a", "NVIDIA H200", total, total)
        assert memory.usable_bytes(mem_fraction, Device(platform=platform, kind="x", gpu=gpu, why="")) == expected

    def test_of_one_that_does_not_say(self, monkeypatch: pytest.MonkeyPatch):
        class Silent:
            def memory_stats(self) -> None:
                return None

        monkeypatch.setattr(jax, "local_devices", lambda: [Silent()])
        with pytest.raises(MemoryPlanError, match="unset XLA_PYTHON_CLIENT_ALLOCATOR"):
            memory.usable_bytes(0.5, Device(platform="gpu", kind="x", gpu=None, why=""))

    def test_of_a_cpu(self):
        cpu = Device(platform="cpu", kind="cpu", gpu=None, why="")
        assert 0 < memory.usable_bytes(0.5, cpu) < memory.usable_bytes(1.0, cpu)
