"""From options to an engine that is ready: model directory, memory plan, weights, programs."""

import dataclasses
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jsg.cache.pool import HIDDEN_KEPT, make_pool, make_states
from jsg.cache.radix import RadixCache
from jsg.cache.windows import make_allocator
from jsg.config import EngineConfig, option
from jsg.engine.child.protocol import ModelInfo, Progress
from jsg.engine.device import few_bits_kernels, fp8_kernels, program_store
from jsg.engine.device.devices import Device, check_number_types, multiplies_e4m3, open_device, processor
from jsg.engine.device.executables import COMPILER_OPTIONS, QUANTISED_OPTIONS, Executables, use_compilation_cache
from jsg.engine.device.memory import (
    MemoryPlan,
    largest_step_bytes,
    plan_memory,
    total_code_bytes,
    usable_bytes,
    vision_shape,
)
from jsg.engine.device.panels import lay_out
from jsg.engine.device.pool_sizes import draft_row_bytes, layer_pages
from jsg.engine.device.program_store import ProgramStore
from jsg.engine.device.programs import POOL_KINDS, DeviceState, Programs, RunnerConfig, make_state, over_devices
from jsg.engine.device.runner import ModelRunner
from jsg.engine.embedder import read_embedder
from jsg.engine.find import find_model
from jsg.engine.grammars.constraints import Constraints
from jsg.engine.grammars.kernel_folder import KernelFolder, kernel_cache_of
from jsg.engine.grammars.lexicon import LexiconLoader
from jsg.engine.hosts.identity import code_identity
from jsg.engine.hosts.party import Follower, Leader, Party, meet
from jsg.engine.private_directory import with_usable_cache
from jsg.engine.profile import profiled_compiler_options
from jsg.engine.progress import Report, counted, load_progress
from jsg.engine.selfcheck import DecodeSteps, step_cost
from jsg.engine.shapes import shapes_of
from jsg.errors import ConfigError, MemoryPlanError
from jsg.kernels_pallas import machine_code, ops, tuning
from jsg.models.config import read_spec
from jsg.models.llava import Llava
from jsg.models.loading import abstract_model, load_model, resolve_dtype, resolve_kv_dtype, with_kept, with_own_head
from jsg.models.quantise import STORED
from jsg.models.spec import ModelSpec
from jsg.models.tensor_parallel import bytes_on_one_device, make_mesh, sharding_of
from jsg.sched.buckets import Buckets
from jsg.sched.config import SchedulerConfig
from jsg.sched.scheduler import Scheduler
from jsg.sched.vision_store import NEWLINE_ROW, VisionShape
from jsg.sources import find_tokenizer
from jsg.types import Embedder, JumpForward

logger = logging.getLogger(__name__)

Read = tuple[ModelSpec, Embedder | None] | None
"""A model over the devices, and how it embeds; None for one that is not read yet."""

RUNS_BEFORE_READY = {"gpu": 2}
"""Runs of each program, by platform, before a request may use it. On NVIDIA GPUs XLA records the CUDA graph of a
program in its second run. On an H200 a run without the graph took 4.2 ms, the next 2.2, and later ones about 2.1."""

LOWERED_BEFORE_READY = frozenset({"gpu", "tpu"})
"""Platforms on which every program is lowered before the engine is ready, and the programs that a first request uses
are compiled too. Lowering in a thread takes the interpreter lock from the step loop. The short steps of an accelerator
would feel that more than the long steps of a CPU. The 80 programs of a Llama 8B for a TPU take 10 s of a processor."""


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine."""

    info: ModelInfo
    decode_steps: DecodeSteps
    scheduler: Scheduler
    cache: RadixCache
    runner: ModelRunner
    constraints: Constraints


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """Options with every default decided."""

    config: EngineConfig
    directory: Path
    model: ModelSpec
    dtype: jnp.dtype
    kv_dtype: jnp.dtype
    context_length: int
    page_size: int
    max_running: int
    buckets: Buckets
    device: Device
    vision: VisionShape | None
    embedder: Embedder | None
    mesh: Mesh | None
    party: Party | None

    @property
    def platform(self) -> str:
        """JAX's name for the kind of device."""
        return self.device.platform

    def __str__(self) -> str:
        """The choices and their reasons, for people; the memory plan follows them."""
        shapes, quantization = self.buckets, self.config.quantization
        kernels = "" if quantization == "none" else f", kernels in {quantization}"
        kernels += ", products in e4m3" if fp8_kernels.rounds_rows(self.device, self.config, self.model) else ""
        kernels += f", experts in {self.config.ep_size} groups" if self.config.ep_size > 1 else ""
        hosts = "" if self.party is None else f", number {self.config.node_rank} of {self.config.nnodes} hosts"
        lost = self.page_size // 2  # a prefix ends anywhere in its last page
        pages = f" (prefixes are found {lost} tokens shorter on average; --page-size lowers it)" if lost else ""
        return (
            f"device: {self.device}{hosts}\n"
            f"programs: {self.dtype.name}{kernels}, {self._implementations()}, KV pool in {self.kv_dtype.name}, "
            f"page size {self.page_size}{pages}; steps of up to {shapes.max_rows} requests and {shapes.max_tokens} new "
            f"tokens in {len(shapes.all)} shapes{self._advice()}"
        )

    def _implementations(self) -> str:
        """Which kernels were chosen when programs were traced, and from which file their block sizes are."""
        best = ops.best_implementation()
        shown = f"attention by {('reference' if ops.ATTENTION in ops.refusals else best)!r}"
        if others := sorted(ops.refusals.keys() - {ops.ATTENTION}):
            shown += f", {' and '.join(others)} by 'reference'"
        if best == "triton":
            shown += f", block sizes of tuning/{tuning.class_of(self.device.capability).name}.json"
        return shown

    def _advice(self) -> str:
        """What would be faster on this CPU and change answers little, for the end of a line; empty if nothing would."""
        is_slow = self.dtype == jnp.float32 and machine_code.is_faster_in_bfloat16()
        advice = "; --dtype bfloat16 would be faster on this CPU" if is_slow else ""
        # Kernels of experts, and those that several devices share, are converted in every step.
        is_read_in_8_bits = ops.best_implementation() == "native" and self.mesh is None and not self.model.has_experts
        if is_read_in_8_bits and self.config.quantization == "none":
            advice += "; --quantization int8 would be faster for few requests at a time"
        return advice

    def conditions(self) -> dict[str, str]:
        """What the programs of the engine depend on, by the name that a refusal gives it."""
        config = self.config
        plain = ("quantization", "tp_size", "ep_size", "deterministic", "max_states")
        options = {name: getattr(config, name) for name in plain} | {
            "dtype": self.dtype.name,
            "kv_cache_dtype": self.kv_dtype.name,
            "fp8_products": fp8_kernels.rounds_rows(self.device, self.config, self.model),
            "context_length": self.context_length,
            "page_size": self.page_size,
            "max_running_requests": self.max_running,
            "chunked_prefill_size": self.buckets.max_tokens,
            "profile_dir": "with a directory" if config.profile_dir else None,
            "vision_cache_size": self.vision,
            "task": "generate" if self.embedder is None else "embed",
            "speculative": "off" if self.model.draft is None else "auto",
        }
        device = f"{self.device.count} x {processor()}" if self.platform == "cpu" else self.device.name
        if self.device.capability is not None:
            device = f"{self.device.count} of compute capability {'.'.join(map(str, self.device.capability))}"
        shape = dataclasses.replace(self.model, draft=None), self.model.names.kept
        model = hashlib.sha256(repr(shape).encode()).hexdigest()[:16]
        named = {option(name): str(value) for name, value in options.items()}
        return code_identity([self.platform]) | {"device": device, "a model of shape": model} | named

    def runner_config(self) -> RunnerConfig:
        """Shapes of the programs."""
        return RunnerConfig(
            vocab_size=self.model.vocab_size,
            num_rows=self.max_running + 1,
            columns=-(-self.context_length // self.page_size),
            page_size=self.page_size,
            eos_token_ids=frozenset(self.model.eos_token_ids),
            vision=self.vision,
            embeds=self.embedder is not None,
            num_groups=len(self.model.page_groups),
            has_states=bool(self.model.state_shapes),
            has_drafts=self.model.draft is not None,
            has_switches=self.platform != "gpu",
        )

    @property
    def vision_row_bytes(self) -> int:
        """Bytes of a row of the vision pool."""
        return self.model.hidden_size * self.dtype.itemsize

    def make_state(self, plan: MemoryPlan) -> DeviceState:
        """The state before the first step, with the pool that is planned."""
        model, num_rows = self.model, self.max_running + 1
        place = functools.partial(sharding_of, self.mesh)
        pool = make_pool(
            model.kv_shapes,
            layer_pages(model, plan.num_pages(self.page_size), num_rows, self.page_size),
            self.page_size,
            self.kv_dtype,
            is_by_head=ops.is_pool_by_head(self.platform),
            place=place,
        )
        pool = pool._replace(states=make_states(model.state_shapes, plan.num_slots, self.dtype, place))
        if model.draft is not None:
            shape = num_rows, HIDDEN_KEPT, model.hidden_size
            pool = pool._replace(hidden=(jnp.zeros(shape, self.dtype, device=sharding_of(self.mesh, None, 3)),))
        rows, whole = None, sharding_of(self.mesh, None, 2)
        if self.vision is not None:
            rows = jnp.zeros((self.vision.num_rows, model.hidden_size), self.dtype, device=whole)
        return make_state(self.runner_config(), pool, rows, self.mesh)

    def abstract_state(self, plan: MemoryPlan) -> DeviceState:
        """As `make_state`, with shapes in place of arrays."""
        axes = [[shape.heads_axis + 1 for shape in shapes] for shapes in self.model.state_shapes]
        return over_devices(jax.eval_shape(lambda: self.make_state(plan)), self.mesh, axes)


def start(config: EngineConfig, report: Report) -> Parts:
    """Loads the model, plans memory, compiles the essential programs, and starts to compile the others.

    With several hosts, the host that schedules calls this.

    Raises:
        JsgError: The model, the options or the memory do not allow it.
    """
    settings = begin(config, report)
    eos_ids = frozenset(settings.model.eos_token_ids)
    kernels = KernelFolder(kernel_cache_of(settings.config))
    directory = find_tokenizer(config.tokenizer_path, settings.directory)  # before the long work: it may be missing
    lexicon = LexiconLoader(directory, settings.model.vocab_size, eos_ids, kernels)
    kernels.begin()  # beside the long work, in another process
    runner, plan = _make_runner(settings, report)
    if isinstance(settings.party, Leader):
        settings.party.open(runner.replica, runner.programs.executables)
        runner.calls = settings.party
    size, groups = settings.page_size, settings.model.page_groups
    num_slots = (settings.max_running, plan.num_states) if settings.model.state_shapes else None
    allocator = make_allocator(plan.num_pages(size), size, has_layers=None in groups, num_slots=num_slots)
    info = _info(settings, plan)
    cache = RadixCache(size, allocator, enabled=info.caches_prefixes)
    kernels.wait()
    lexicon.begin()  # last: it is Python, in whose time nothing else of the start goes on
    return Parts(
        info=info,
        decode_steps=_decode_steps(settings, plan, runner),
        scheduler=Scheduler(_scheduler_config(settings), allocator, cache),
        cache=cache,
        runner=runner,
        constraints=Constraints(
            lexicon,
            settings.model.vocab_size,
            eos_ids,
            cast(JumpForward, config.jump_forward),
        ),
    )


def follow(config: EngineConfig, report: Report) -> None:
    """Follows the host that schedules until that one ends, as every other one of several hosts does.

    Raises:
        JsgError: As `start`.
    """
    settings = begin(config, report)
    assert isinstance(settings.party, Follower), "a host that follows has a rank above 0"
    runner, _ = _make_runner(settings, report)
    settings.party.follow(runner.replica, runner.programs.executables)
    runner.calls.close()
    runner.programs.executables.close()  # a thread that still compiles when Python ends would abort the process


def begin(config: EngineConfig, report: Report) -> Settings:
    """Meets the other hosts, if there are any, starts JAX and decides every default."""
    config = with_usable_cache(config)
    # Several hosts tune the programs of GPUs together, so all of them must find a program in the cache, or none.
    keeps_programs = config.nnodes == 1 and not config.disable_compilation_cache
    if keeps_programs or config.shared_cache_dir is not None:
        use_compilation_cache(config.compilation_cache_dir)
    directory, party = find_model(config), None
    if config.nnodes > 1:
        party = meet(config, directory, lambda there, count: report(Progress("hosts", there, count)))
    device = open_device(config.mem_fraction_static, config.tp_size // config.nnodes)
    return settle(config, directory, device, party)


def _make_runner(settings: Settings, report: Report) -> tuple[ModelRunner, MemoryPlan]:
    """Plans memory, loads the model, compiles and warms up."""
    config = settings.config
    store = _open_store(settings)
    executables = make_executables(settings, Executables, store=store)
    plan = make_plan(settings, executables) if store is None else _stored_plan(settings, store)
    where = f", on each of {config.tp_size} devices" if config.tp_size > 1 else ""
    report(Progress("plan", 1, 1, f"{settings}\n{plan}{where}"))
    model = load_model(
        settings.directory,
        settings.model,
        load_format=config.load_format,
        dtype=settings.dtype,
        quantization=config.quantization,
        seed=config.random_seed,
        mesh=settings.mesh,
        progress=load_progress(report),
        compares_head=False,
    )
    _lay_out(model, settings)
    state = _with_newline(settings.make_state(plan), model)
    programs = Programs(model, settings.runner_config(), state, settings.buckets, executables)
    runner = ModelRunner(programs, state)
    _warm_up(runner, executables, settings, report)
    return runner, plan


def make_executables(settings: Settings, make: Callable[..., Executables], **more: Any) -> Executables:
    """The executables of an engine, without programs yet. `make` gets the further arguments too."""
    config, takes_fp8 = settings.config, multiplies_e4m3(settings.device, settings.config.fp8_products)
    forms = fp8_kernels.forms_of(config, settings.model)
    wide = [form for form in forms if not (takes_fp8 and fp8_kernels.takes(form))]  # whose rows are not rounded
    quantization = "int8" if any(form.scales_columns for form in wide) else "none"
    return make(
        forbid_compile=config.forbid_compile,
        runs_before_ready=RUNS_BEFORE_READY.get(settings.platform, 0),
        compiler_options=_compiler_options(config, settings.platform, quantization),
        options_by_kind={"encode": _compiler_options(config, settings.platform, "none")},
        mesh=settings.mesh,
        **more,
    )


def _open_store(settings: Settings) -> ProgramStore | None:
    """The programs of `--programs`, which are for a start like this one."""
    if settings.config.programs is None:
        return None
    store = program_store.open_store(Path(settings.config.programs))
    store.check(settings.conditions())
    store.load_kernels()
    return store


def _stored_plan(settings: Settings, store: ProgramStore) -> MemoryPlan:
    """The plan for which the programs were compiled, if this machine has the memory for it."""
    plan, asked = store.plan, settings.config.max_total_tokens
    if asked not in (None, plan.pool_tokens):
        raise ConfigError(
            f"--programs {store.directory} was compiled for --max-total-tokens {plan.pool_tokens}, but this start has "
            f"{asked}; leave the option out, or run jsg compile again"
        )
    plan = dataclasses.replace(plan, limit_bytes=usable_bytes(settings.config.mem_fraction_static, settings.device))
    if plan.needed_bytes > plan.limit_bytes:
        raise MemoryPlanError(
            f"the programs of --programs {store.directory} need more memory than there is ({plan}); run jsg compile "
            "again with a smaller --max-total-tokens"
        )
    return plan


def abstract_model_of(settings: Settings) -> nnx.Module:
    """The model with shapes in place of weights, laid out as it will be."""
    model = abstract_model(settings.model, settings.dtype, settings.config.quantization, settings.mesh)
    _lay_out(model, settings)
    return model


def _lay_out(model: nnx.Module, settings: Settings) -> None:
    """Lays kernels out as the products of this device read them."""
    if multiplies_e4m3(settings.device, settings.config.fp8_products):
        fp8_kernels.lay_out(model)
    if settings.platform == "tpu":
        few_bits_kernels.lay_out(model)
    if settings.platform == "cpu" and settings.mesh is None:
        lay_out(model)


def _with_newline(state: DeviceState, model: nnx.Module) -> DeviceState:
    """The state with the features that a vision model puts behind each row of patches, if it has them."""
    newline = model.vision.newline if isinstance(model, Llava) else None
    if state.vision is None or newline is None:
        return state
    return state._replace(vision=state.vision.at[NEWLINE_ROW].set(newline[...]))


def _compiler_options(config: EngineConfig, platform: str, quantization: str) -> dict[str, str | bool | int]:
    """XLA's options for programs of a model with this quantization."""
    profiled = profiled_compiler_options(platform) if config.profile_dir else {}
    options = QUANTISED_OPTIONS if quantization in STORED else COMPILER_OPTIONS
    return {**options.get(platform, {}), **profiled}


def settle(config: EngineConfig, directory: Path, device: Device, party: Party | None, read: Read = None) -> Settings:
    """Decides every default. The mesh of a device that is not here is missing. The model may have been read before."""
    model, embedder = read or _read_model(config, directory)
    if config.deterministic and config.tp_size > 2 and (device.platform != "cpu" or party is not None):
        raise ConfigError(
            f"--deterministic needs --tp-size 1 or 2, but got {config.tp_size}: the order in which more devices add up "
            "depends on where a token lies; leave one of them out"
        )
    types = {name: getattr(config, name) for name in ("kv_cache_dtype", "quantization", "fp8_products")}
    check_number_types(device, **types)
    on_cpu = device.platform == "cpu"
    context_length = config.context_length or model.max_position_embeddings
    if context_length > model.max_position_embeddings:
        raise ConfigError(
            f"--context-length must be at most the model's {model.max_position_embeddings}, but got {context_length}"
        )
    model = model.for_context(context_length)
    max_running = config.max_running_requests or (32 if on_cpu else 256)
    dtype = resolve_dtype(config.dtype, device.platform)
    row_bytes = model.hidden_size * dtype.itemsize
    return Settings(
        config=config,
        directory=directory,
        model=model,
        dtype=dtype,
        kv_dtype=resolve_kv_dtype(config.kv_cache_dtype, dtype),
        context_length=context_length,
        page_size=config.page_size or ops.default_page_size(),
        max_running=max_running,
        buckets=shapes_of(config, model, max_running, device.platform),
        device=device,
        vision=vision_shape(config, model, platform=device.platform, row_bytes=row_bytes),
        mesh=make_mesh(config.tp_size, config.ep_size) if device.described_bytes is None else None,
        party=party,
        embedder=embedder,
    )


def _read_model(config: EngineConfig, directory: Path) -> tuple[ModelSpec, Embedder | None]:
    """The shape of a model, and how it embeds if it does. Logs what a file says that has no effect."""
    model = read_spec(directory, drafts=config.speculative != "off").over_devices(config.tp_size, config.ep_size)
    for note in model.notes:
        logger.warning("%s", note)
    embedder = read_embedder(directory, config.task, model)
    if embedder is not None:  # whose checkpoint may have no head
        model = dataclasses.replace(model, draft=None)
        model = with_kept(directory, model, config.load_format) if config.load_format != "dummy" else model
        return dataclasses.replace(model, tie_word_embeddings=True), embedder
    return model if config.load_format == "dummy" else with_own_head(directory, model, config.load_format), None


def make_plan(settings: Settings, executables: Executables) -> MemoryPlan:
    """The memory plan, which depends on the temporary arrays of the largest programs, and on a TPU on programs' code.

    Their size is known once these programs are compiled. They are compiled for abstract arrays, so nothing is
    allocated. Those that take the pool are compiled again if its size is another than was assumed: all that there is,
    or on a TPU the least. A plan that fails even without them is refused before anything is compiled.
    """
    ops.refusals.clear()
    model = abstract_model_of(settings)
    limit_bytes = usable_bytes(settings.config.mem_fraction_static, settings.device)
    if settings.party is not None:
        limit_bytes = settings.party.agree("devices", settings.device.name, limit_bytes)

    weights_bytes = sum(map(bytes_on_one_device, jax.tree.leaves(nnx.state(model))))
    first = plan_of(settings, limit_bytes, weights_bytes, 0)
    if settings.platform == "tpu" and settings.config.max_total_tokens is None:
        # XLA counts the pool, and refuses a program that does not fit beside it.
        config = dataclasses.replace(settings.config, max_total_tokens=settings.context_length)
        first = plan_of(dataclasses.replace(settings, config=config), limit_bytes, weights_bytes, 0)
    sizes = _measured(settings, executables, model, first)
    if settings.party is not None:
        sizes = [-settings.party.agree("sizes", "", -size) for size in sizes]  # the most that any host needs
    final = plan_of(settings, limit_bytes, weights_bytes, *sizes)
    if (final.pool_tokens, final.windows) != (first.pool_tokens, first.windows):
        executables.clear(POOL_KINDS)
        _measured(settings, executables, model, final)
    return final


def plan_of(
    settings: Settings, limit_bytes: int, weights_bytes: int, temporary_bytes: int, code_bytes: int = 0
) -> MemoryPlan:
    """The memory plan of an engine on devices with so much memory each, and with so large weights, steps and code."""
    return plan_memory(
        settings.config,
        settings.model,
        platform=settings.platform,
        limit_bytes=limit_bytes,
        page_size=settings.page_size,
        kv_itemsize=settings.kv_dtype.itemsize,
        weights_bytes=weights_bytes,
        temporary_bytes=temporary_bytes,
        code_bytes=code_bytes,
        max_running=settings.max_running,
        context_length=settings.context_length,
        chunk=settings.buckets.chunk,
        vision_bytes=settings.vision.num_rows * settings.vision_row_bytes if settings.vision else 0,
        num_devices=settings.config.tp_size,
        draft_row_bytes=draft_row_bytes(
            settings.model, settings.page_size, settings.dtype.itemsize, settings.kv_dtype.itemsize
        ),
        bytes_per_state=settings.model.state_bytes(settings.dtype.itemsize),
    )


def _measured(settings: Settings, executables: Executables, model: nnx.Module, plan: MemoryPlan) -> Sequence[int]:
    """Compiles the largest programs, and on a TPU those of a first request; returns two numbers of bytes.

    These are what a step needs beside its arguments, and the code of all programs. A TPU has the code in its memory.
    XLA says 0 for others: on a GPU the code lies in the memory that JAX does not reserve.
    """
    state = settings.abstract_state(plan)
    programs = Programs(model, settings.runner_config(), state, settings.buckets, executables)
    largest, first = programs.largest(), programs.essential() + programs.usual() if settings.platform == "tpu" else []
    names = list(dict.fromkeys(largest + first))
    programs.declare(names)
    executables.compile(names)
    step_bytes = largest_step_bytes([executables.compiled(name) for name in largest], settings.buckets, settings.model)
    return step_bytes, total_code_bytes({name: executables.compiled(name) for name in first}, programs.names)


def _warm_up(runner: ModelRunner, executables: Executables, settings: Settings, report: Report) -> None:
    config, programs = settings.config, runner.programs
    programs.declare()
    is_ahead = settings.platform in LOWERED_BEFORE_READY
    if is_ahead or config.forbid_compile:
        executables.lower_all()
    names = programs.essential()
    if is_ahead:
        names += programs.usual()
    if config.forbid_compile:
        names = executables.names()
    executables.compile(names, counted(report, len(names)))
    if settings.party is not None:
        settings.party.agree("warm-up", "")  # the first sum over hosts waits for them no longer than 30 s
        runner.rehearse()
    runner.warm_up()
    report(Progress("warm-up", len(names), len(names)))
    executables.seal()
    executables.compile_rest_in_background()


def _scheduler_config(settings: Settings) -> SchedulerConfig:
    config = settings.config
    return SchedulerConfig(
        context_length=settings.context_length,
        vocab_size=settings.model.vocab_size,
        eos_token_ids=frozenset(settings.model.eos_token_ids),
        buckets=settings.buckets,
        max_running=settings.max_running,
        policy=config.schedule_policy,
        conservativeness=config.schedule_conservativeness,
        max_prefill_tokens=config.max_prefill_tokens,
        max_bypass_tokens=config.max_bypass_tokens,
        max_queued=config.max_queued_requests,
        embeds=settings.embedder is not None,
        vision=settings.vision,
    )


def _decode_steps(settings: Settings, plan: MemoryPlan, runner: ModelRunner) -> DecodeSteps:
    is_cpu = settings.platform == "cpu"  # whose devices share one processor
    itemsize, forms = settings.dtype.itemsize, fp8_kernels.forms_of(settings.config, settings.model)
    kernel_itemsize = sum(form.bytes_per_number for form in forms) / len(forms) if forms else itemsize
    cost = functools.partial(
        step_cost,
        settings.model,
        itemsize,
        kv_bytes_per_token=plan.bytes_per_token * settings.config.tp_size,
        kernel_itemsize=kernel_itemsize,
        num_devices=1 if is_cpu else settings.config.tp_size,
        num_groups=1 if is_cpu else settings.config.ep_size,
    )
    return DecodeSteps(
        runner=runner,
        cost=cost,
        vocab_size=settings.model.vocab_size,
        context_length=settings.context_length,
        page_size=settings.page_size,
        num_pages=tuple(map(plan.num_pages(settings.page_size).__getitem__, settings.model.page_groups)),
    )


def _info(settings: Settings, plan: MemoryPlan) -> ModelInfo:
    caches_states = plan.num_states > 0
    return ModelInfo(
        model_path=settings.config.model_path,
        context_length=settings.context_length,
        vocab_size=settings.model.vocab_size,
        eos_token_ids=settings.model.eos_token_ids,
        dtype=settings.dtype.name,
        kv_dtype=settings.kv_dtype.name,
        device=settings.device.name,
        max_running_requests=settings.max_running,
        max_total_tokens=plan.pool_tokens,
        max_request_tokens=min(settings.context_length, plan.pool_tokens),
        page_size=settings.page_size,
        caches_prefixes=not settings.config.disable_radix_cache and (caches_states or not settings.model.state_shapes),
        caches_states=caches_states,
        memory_plan=plan.parts,
        embedder=settings.embedder,
    )
