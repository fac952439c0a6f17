"""The programs of a model as `jsg compile --target` compiles them, one at a time, and what can be read off them.

There are only shapes, and nothing is allocated. None of what is read says how fast a program is, or that its results
are right.
"""

import functools
import json
import math
import pathlib
import re
import sys
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from bench import hlo
from bench.hlo import Matrices
from jsg.config import EngineConfig
from jsg.engine.device.executables import no_compilation_cache
from jsg.engine.device.programs import DeviceState, Programs
from jsg.engine.device.targets import traced_for
from jsg.engine.precompile import TargetExecutables, begin_for, find_target
from jsg.engine.startup import Settings, abstract_model_of, make_executables, plan_of
from jsg.models.loading import abstract_model, parameters
from jsg.models.tensor_parallel import bytes_on_one_device

NO_ESTIMATE = 2**63 - 1
"""What XLA writes for an operation that it knows nothing of is as large as an integer can be."""


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled program.

    Attributes:
        hlo: The optimised program as text.
        temporary_bytes: The bytes of memory beside arguments and results, on one device.
        aliased_bytes: The bytes of results that reuse the memory of donated arguments.
        code_bytes: Those of the program itself.
    """

    hlo: str
    temporary_bytes: int
    aliased_bytes: int
    code_bytes: int

    @property
    def cycles(self) -> int:
        """XLA's estimate for a TPU, each loop counted once: a model of it and no measurement."""
        found = map(int, re.findall(r'"estimated_cycles":"(\d+)"', self.hlo))
        return sum(cycles for cycles in found if cycles < NO_ESTIMATE)

    def writers(self, num_bytes: int) -> set[str]:
        """The names, without numbers, of the operations that write an array of so many bytes or more to memory."""
        return {
            re.sub(r"(\.\d+|\.clone)*$", "", made.name)
            for made in hlo.writers(self.hlo)
            if any(array.num_bytes >= num_bytes and not array.is_in_vmem for array in made.arrays)
        }

    def rewritten(self, kernels: Matrices, bits: float) -> list[str]:
        """The operations that write one of these kernels anew: in HBM, or in VMEM in more bits for each number."""
        return [
            made.text
            for made in hlo.writers(self.hlo)
            for array in made.arrays
            if array.is_one_of(kernels) and (hlo.ITEM_BITS[array.dtype] > bits or not array.is_in_vmem)
        ]

    def multiplied_by_number(self, kernels: Matrices) -> list[str]:
        """The products with these kernels that are no product of matrices: each of their numbers is multiplied."""
        return [
            made.text
            for made in hlo.operations(self.hlo)
            if made.operation == "multiply" and made.arrays[0].is_one_of(kernels)
        ]


@dataclass(frozen=True, slots=True)
class Model:
    """A model on devices that are not here.

    Attributes:
        settings: Its options, with every default decided.
        state: The shapes of the pool and of the tables.
        kernels: The kernels of one device, each as (inputs, outputs) of a matrix.
        executables: Its programs by name, of which none is compiled yet.
    """

    settings: Settings
    state: DeviceState
    kernels: Matrices
    executables: TargetExecutables

    @property
    def donated_bytes(self) -> int:
        """The bytes of pool and page table on one device, which a forward pass changes in place."""
        return sum(map(bytes_on_one_device, jax.tree.leaves((self.state.pool, self.state.page_table))))

    @property
    def layer_bytes(self) -> int:
        """The bytes of the keys and values of a layer on one device."""
        return sum(map(bytes_on_one_device, jax.tree.leaves(self.state.pool.layers[0])))

    def program(self, name: Hashable) -> Program:
        """Compiles a program."""
        with no_compilation_cache():  # what is not for a device that is here can be written there, but not read
            self.executables.compile([name])
        compiled = self.executables.compiled(name)
        memory, text = compiled.memory_analysis(), compiled.as_text()
        assert memory is not None and text is not None, "XLA says so of every program for a TPU or a GPU"
        return Program(text, memory.temp_size_in_bytes, memory.alias_size_in_bytes, memory.generated_code_size_in_bytes)


def make_model(shape: dict[str, Any], target: str, *, pool_tokens: int = 100_000, **options: Any) -> Model:
    """Declares the programs of a model.

    Args:
        shape: Its `config.json`.
        target: The name of what it is compiled for.
        pool_tokens: The number of KV slots.
        options: Those of the engine.
    """
    found = find_target(target)
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        config = EngineConfig(model_path=folder, load_format="dummy", max_total_tokens=pool_tokens, **options)
        mesh = found.mesh(config.tp_size, config.ep_size)
        with traced_for(mesh):
            settings = begin_for(config, found, mesh)
            executables = make_executables(settings, functools.partial(TargetExecutables, mesh, target))
            assert isinstance(executables, TargetExecutables)
            state = settings.abstract_state(plan_of(settings, sys.maxsize, 0, 0))
            Programs(
                abstract_model_of(settings), settings.runner_config(), state, settings.buckets, executables
            ).declare()
            plain = abstract_model(settings.model, settings.dtype, mesh=executables.mesh)
    return Model(settings, state, kernels_of(plain), executables)


def kernels_of(module: nnx.Module) -> frozenset[tuple[int, int]]:
    """Kernels of a device as matrices: D x out for [D, *out], and both E·D x F and E·F x D for experts' [E, D, F]."""
    found: set[tuple[int, int]] = set()
    for param in parameters(module):
        if (axis := param.get_metadata("summed_axis")) is not None:
            value = param.get_value()
            sharding = getattr(value, "sharding", None)  # kernels in few bits have none
            shape = value.shape if sharding is None else sharding.shard_shape(value.shape)
            rows = [shape[0]] if axis == 0 else [shape[0] * side for side in shape[1:]]
            found |= {(side, math.prod(shape) // side) for side in rows}
    return frozenset(found)
