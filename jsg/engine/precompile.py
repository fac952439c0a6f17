"""`jsg compile`: all programs of a model, for this machine's device or for others that are not here."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jsg.config import EngineConfig
from jsg.engine.child.protocol import Progress
from jsg.engine.device import cards, program_store, tpus
from jsg.engine.device.executables import Executables, no_compilation_cache
from jsg.engine.device.programs import Programs
from jsg.engine.device.targets import Target, traced_for
from jsg.engine.find import find_model
from jsg.engine.grammars.kernel_folder import KernelFolder, kernel_cache_of
from jsg.engine.progress import Report, counted
from jsg.engine.startup import (
    Settings,
    abstract_model_of,
    begin,
    make_executables,
    make_plan,
    settle,
)


def precompile(config: EngineConfig, directory: Path, report: Report, target: str | None = None) -> None:
    """Compiles every program of an engine, and writes them for starts with `--programs`.

    The kernels of grammars do not depend on the model: they are compiled into the cache directory of such starts, for
    this machine's processor.

    No weight is loaded, because programs depend on the shapes of arrays only.

    Args:
        config: The options of those starts.
        directory: The folder to make.
        report: Is told how far it is.
        target: What will run them, of `cards.NAMES` or `tpus.NAMES`; None for this machine's device.

    Raises:
        JsgError: As `start`, or the directory cannot be written.
    """
    program_store.check_new(directory)
    kernels = KernelFolder(kernel_cache_of(config))
    kernels.begin()
    config = dataclasses.replace(config, programs=None, disable_compilation_cache=True)
    mesh, make, found = None, Executables, None
    if target is not None:
        found = find_target(target)
        mesh = found.mesh(config.tp_size, config.ep_size)
        make = functools.partial(TargetExecutables, mesh, target)
    with no_compilation_cache(), traced_for(mesh):
        settings = begin(config, report) if found is None else begin_for(config, found, mesh)
        executables = make_executables(settings, make)
        plan = make_plan(settings, executables)
        report(Progress("plan", 1, 1, f"{settings}\n{plan}"))
        state = settings.abstract_state(plan)
        programs = Programs(abstract_model_of(settings), settings.runner_config(), state, settings.buckets, executables)
        programs.declare()
        names = executables.names()
        executables.compile(names, counted(report, len(names)))
    report(Progress("warm-up", len(names), len(names)))
    compiled = {name: executables.compiled(name) for name in names}
    program_store.save(directory, compiled, settings.conditions(), plan)
    kernels.wait()


def find_target(name: str) -> Target:
    """The target of this name, one of `cards.NAMES` or `tpus.NAMES`."""
    return tpus.target(name) if name in tpus.NAMES else cards.card(name).target


def begin_for(config: EngineConfig, target: Target, mesh: Mesh | None) -> Settings:
    """As `begin`, for devices that are not here. JAX starts on this machine's processor."""
    device = target.device(config.tp_size, "programs are compiled for it")
    settings = settle(config, find_model(config), device, None)
    return dataclasses.replace(settings, mesh=mesh if config.tp_size > 1 else None)


class TargetExecutables(Executables):
    """Executables that are only compiled, for devices that are not here."""

    def __init__(self, target: Mesh, name: str, **options: Any):
        super().__init__(**options)
        self._target = target
        self._target_name = name

    @property
    def _device_name(self) -> str:
        return self._target_name

    def _over_devices(
        self, fn: Callable[..., Any], args: tuple[Any, ...], out_specs: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        fn, args = super()._over_devices(fn, args, out_specs)
        if self.mesh is None:
            whole = NamedSharding(self._target, PartitionSpec())
            args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), args)
        return fn, args

    def _traced(self, fn: Callable[..., Any], args: tuple[Any, ...], donate: tuple[int, ...]) -> jax.stages.Lowered:
        with traced_for(self._target):
            return super()._traced(fn, args, donate)
