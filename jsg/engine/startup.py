"""From knobs to an engine that is ready: model directory, memory plan, weights, programs."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from jsg.cache.allocator import PageAllocator
from jsg.cache.pool import make_pool
from jsg.cache.radix import RadixCache
from jsg.config import EngineConfig
from jsg.engine.executables import Executables, use_compilation_cache
from jsg.engine.memory import MemoryPlan, plan_memory
from jsg.engine.protocol import ModelInfo, Progress
from jsg.engine.runner import DeviceState, ModelRunner, RunnerConfig, make_state
from jsg.errors import ConfigError
from jsg.models.config import ModelConfig
from jsg.models.loading import abstract_model, load_model, resolve_dtype
from jsg.sched.buckets import Buckets, make_buckets, make_deterministic_buckets
from jsg.sched.scheduler import Scheduler, SchedulerConfig
from jsg.sources import resolve_model

Report = Callable[[Progress], None]


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    info: ModelInfo
    plan: MemoryPlan
    scheduler: Scheduler
    cache: RadixCache
    allocator: PageAllocator
    runner: ModelRunner
    executables: Executables


@dataclasses.dataclass(frozen=True, slots=True)
class _Settings:
    """Knobs with every default decided."""

    config: EngineConfig
    directory: Path
    model: ModelConfig
    dtype: jnp.dtype
    context_length: int
    max_running: int
    buckets: Buckets
    platform: str
    device_name: str

    def runner_config(self) -> RunnerConfig:
        return RunnerConfig(
            vocab_size=self.model.vocab_size,
            num_rows=self.max_running + 1,
            columns=-(-self.context_length // self.config.page_size),
            page_size=self.config.page_size,
            eos_token_ids=frozenset(self.model.eos_token_ids),
        )

    def make_state(self, num_pages: int) -> DeviceState:
        model = self.model
        pool = make_pool(
            model.num_layers, num_pages, self.config.page_size, model.num_kv_heads, model.head_dim, self.dtype
        )
        return make_state(self.runner_config(), pool)


def start(config: EngineConfig, report: Report) -> Parts:
    """Loads the model, plans memory, compiles what is needed at once and the rest in the background.

    Raises:
        JsgError: The model, the knobs or the memory do not allow it.
    """
    if not config.disable_compilation_cache:
        use_compilation_cache(config.compilation_cache_dir)
    settings = _settle(config)
    executables = Executables(forbid_compile=config.forbid_compile)
    plan = _plan(settings, executables)
    report(Progress("plan", 1, 1, str(plan)))
    model = load_model(
        settings.directory,
        settings.model,
        load_format=config.load_format,
        dtype=settings.dtype,
        seed=config.random_seed,
        progress=lambda done, total: report(Progress("load", done, total)),
    )
    allocator = PageAllocator(plan.pool_tokens // config.page_size + 1)
    state = settings.make_state(allocator.num_total + 1)
    runner = ModelRunner(model, settings.runner_config(), state, settings.buckets, executables)
    _warm_up(runner, executables, config, report)
    cache = RadixCache(config.page_size, allocator, enabled=not config.disable_radix_cache)
    scheduler = Scheduler(_scheduler_config(settings), allocator, cache)
    return Parts(_info(settings, plan), plan, scheduler, cache, allocator, runner, executables)


def _settle(config: EngineConfig) -> _Settings:
    directory = resolve_model(config.model_path)
    model = ModelConfig.from_directory(directory)
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"
    context_length = config.context_length or model.max_position_embeddings
    if context_length > model.max_position_embeddings:
        raise ConfigError(
            f"--context-length must be at most the model's {model.max_position_embeddings}, but got {context_length}"
        )
    max_running = config.max_running_requests or (32 if on_cpu else 256)
    return _Settings(
        config=config,
        directory=directory,
        model=model,
        dtype=resolve_dtype(config.dtype, device.platform),
        context_length=context_length,
        max_running=max_running,
        buckets=_buckets(config, max_running, on_cpu=on_cpu),
        platform=device.platform,
        device_name=f"{device.platform}: {device.device_kind}",
    )


def _buckets(config: EngineConfig, max_running: int, *, on_cpu: bool) -> Buckets:
    if config.deterministic:
        num_tokens = 64 if on_cpu else 512
        return make_deterministic_buckets(max_running, config.chunked_prefill_size or num_tokens, num_tokens)
    return make_buckets(max_running, config.chunked_prefill_size or max(512 if on_cpu else 8192, max_running))


def _plan(settings: _Settings, executables: Executables) -> MemoryPlan:
    """The memory plan, from the temporaries of the largest programs.

    They are only known once those are compiled, which is done for abstract arrays: nothing is allocated. Where the pool
    has to shrink for them, they are compiled anew, for the smaller pool.
    """
    model = abstract_model(settings.model, settings.dtype)

    def plan(temporary_bytes: int) -> MemoryPlan:
        return plan_memory(
            settings.config,
            settings.model,
            platform=settings.platform,
            kv_itemsize=settings.dtype.itemsize,
            weights_bytes=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(nnx.state(model))),
            temporary_bytes=temporary_bytes,
            max_running=settings.max_running,
            context_length=settings.context_length,
        )

    first = plan(0)
    final = plan(_temporary_bytes(settings, executables, model, first.pool_tokens))
    if final.pool_tokens != first.pool_tokens:
        executables.clear()
        _temporary_bytes(settings, executables, model, final.pool_tokens)
    return final


def _temporary_bytes(settings: _Settings, executables: Executables, model: nnx.Module, pool_tokens: int) -> int:
    """Compiles the largest programs; returns the bytes that the hungriest needs beside what it is given.

    They run one after another. Each needs its intermediate results, and its outputs that are not donated inputs.
    """
    state = jax.eval_shape(lambda: settings.make_state(pool_tokens // settings.config.page_size + 1))
    runner = ModelRunner(model, settings.runner_config(), state, settings.buckets, executables)
    names = runner.lower_largest()
    executables.compile(names)
    analyses = [executables.compiled(name).memory_analysis() for name in names]
    return max(a.temp_size_in_bytes + a.output_size_in_bytes - a.alias_size_in_bytes for a in analyses if a)


def _warm_up(runner: ModelRunner, executables: Executables, config: EngineConfig, report: Report) -> None:
    runner.lower()
    names = runner.all_names() if config.forbid_compile else runner.essential()
    done = 0

    def tell(name: object) -> None:
        nonlocal done
        report(Progress("warm-up", done, len(names), str(name)))
        done += 1

    executables.compile(names, tell)
    report(Progress("warm-up", len(names), len(names)))
    executables.seal()
    executables.compile_rest_in_background()


def _scheduler_config(settings: _Settings) -> SchedulerConfig:
    config = settings.config
    return SchedulerConfig(
        context_length=settings.context_length,
        vocab_size=settings.model.vocab_size,
        eos_token_ids=frozenset(settings.model.eos_token_ids),
        buckets=settings.buckets,
        max_running=settings.max_running,
        policy=config.schedule_policy,
        seed=config.random_seed,
        conservativeness=config.schedule_conservativeness,
        max_prefill_tokens=config.max_prefill_tokens,
        max_bypass_tokens=config.max_bypass_tokens,
        max_queued=config.max_queued_requests,
    )


def _info(settings: _Settings, plan: MemoryPlan) -> ModelInfo:
    return ModelInfo(
        model_path=settings.config.model_path,
        context_length=settings.context_length,
        vocab_size=settings.model.vocab_size,
        eos_token_ids=settings.model.eos_token_ids,
        dtype=settings.dtype.name,
        device=settings.device_name,
        max_running_requests=settings.max_running,
        max_total_tokens=plan.pool_tokens,
        max_request_tokens=min(settings.context_length, plan.pool_tokens),
        page_size=settings.config.page_size,
    )
