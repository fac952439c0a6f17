"""The modelled time of a model's steps on TPUs: compiled programs, at published rates of the chips.

Programs with one layer and with two are compiled. Their difference is a layer, so a step takes the time of the first
and as often that difference as there are more layers. All layers must be alike.
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bench.device.shapes import LLAMA_70B, QWEN3_8B, QWEN3_30B_A3B
from bench.nvidia.programs import read_shape
from bench.shapes import LLAMA_8B
from bench.tpu import compiling
from bench.tpu.chips import CHIPS, LARGER
from bench.tpu.compiling import Compiled, Task
from bench.tpu.program import Loop, Operation, operations, seconds
from jsg.engine.selfcheck import Cost, step_cost
from jsg.engine.shapes import ACCELERATOR_CHUNK
from jsg.kernels_pallas import tpu
from jsg.models.loading import abstract_model
from jsg.models.spec import ModelSpec

MODELS = {"Llama-3-8B": LLAMA_8B, "Qwen3-8B": QWEN3_8B, "Llama-3-70B": LLAMA_70B, "Qwen3-30B-A3B": QWEN3_30B_A3B}
ITEM_BYTES = jnp.bfloat16.dtype.itemsize
PROMPT_TOKENS = 2048
"""The new tokens of a step with prompts. The engine's largest step has 8192, which takes minutes to compile."""
MEMORY_SHARE = 0.85
"""The default of `--mem-fraction-static`."""


class Load(NamedTuple):
    """Requests that run at once, each with a prompt and an answer of so many tokens."""

    rows: int
    prompt: int
    answer: int

    @property
    def contexts(self) -> range:
        """The cached tokens of a request over its answer, at 64 points."""
        return range(self.prompt, self.prompt + self.answer, max(1, self.answer // 64))


class Estimate:
    """A model on devices of a chip."""

    def __init__(self, chip: str, model: str, num_devices: int, kept: Path):
        """Compiles nothing until `compile`."""
        self.name, self.chip, self.model, self.num_devices, self._kept = chip, CHIPS[chip], model, num_devices, kept
        self.config = _config(model)
        self._programs: dict[tuple[tuple[str, int], int], Compiled] = {}

    def fits(self, load: Load) -> bool:
        """Whether weights and the keys and values of all requests, half through their answers, fit into memory."""
        if self.num_devices > (8 if self.name in LARGER else 4) * self.chip.devices:
            return False
        tokens = load.rows * (load.prompt + load.answer // 2)
        held = _weight_bytes(self.model) + tokens * self.config.kv_bytes_per_token(ITEM_BYTES)
        return held / self.num_devices < MEMORY_SHARE * self.chip.memory_bytes

    def compile(self, loads: Sequence[Load]) -> None:
        """Compiles what the other methods need for these loads."""
        wanted = dict.fromkeys((kind, load.rows) for load in loads for kind in ("decode", "sample"))
        keys = [(program, layers) for program in (*wanted, ("extend", PROMPT_TOKENS)) for layers in (1, 2)]
        shape = MODELS[self.model]
        tasks = [Task(self.name, shape, self.num_devices, layers, program) for program, layers in keys]
        self._programs |= zip(keys, compiling.compile_all(tasks, self._kept), strict=True)

    def step(self, load: Load) -> Mapping[str, float]:
        """The seconds of a decode step by kinds of operations, with the greedy choice of tokens."""
        found = Counter(self._all_layers(("decode", load.rows), _blocks(load)))
        found.update(self._seconds(("sample", load.rows), 1, (0, 0, 0)))
        return found

    def prefill(self, load: Load) -> Mapping[str, float]:
        """The seconds of a step with `PROMPT_TOKENS` new tokens of prompts, by kinds of operations."""
        return self._all_layers(("extend", PROMPT_TOKENS), _blocks_of_prompts(load.prompt))

    def rate(self, load: Load) -> float:
        """Output tokens per second if as many requests always run, each prompt is computed once and nothing waits."""
        step, prefill = (sum(each.values()) for each in (self.step(load), self.prefill(load)))
        return _rate(load, step, prefill / PROMPT_TOKENS)

    def bound(self, load: Load) -> float:
        """The same where a step takes as long as all its bytes or all its operations do at the published rates."""
        cached = load.prompt + load.answer // 2
        step = self._floor(step_cost(self.config, ITEM_BYTES, rows=load.rows, cached=cached, new=1, **self._share))
        prompts = max(1, ACCELERATOR_CHUNK // load.prompt)
        cost = step_cost(self.config, ITEM_BYTES, rows=prompts, cached=0, new=load.prompt, **self._share)
        return _rate(load, step, self._floor(cost) / prompts / load.prompt)

    @property
    def _share(self) -> dict[str, int]:
        return {"num_devices": self.num_devices, "kv_bytes_per_token": self.config.kv_bytes_per_token(ITEM_BYTES)}

    def _floor(self, cost: Cost) -> float:
        return max(cost.num_bytes / self.chip.bytes_per_s, cost.num_flops / self.chip.flops_per_s)

    def _all_layers(self, program: tuple[str, int], visits: "Visits") -> Mapping[str, float]:
        one, two = (self._seconds(program, layers, visits) for layers in (1, 2))
        more = len(self.config.layers) - 1
        return {kind: one.get(kind, 0.0) + more * (two[kind] - one.get(kind, 0.0)) for kind in two}

    def _seconds(self, program: tuple[str, int], layers: int, visits: "Visits") -> Mapping[str, float]:
        compiled = self._programs[program, layers]

        def kernel(operation: Operation) -> tuple[float, float]:
            found = compiled.kernels[operation.name]
            if operation.kind != "attention":
                raise NotImplementedError(f"the model knows no trips of the loops of {operation.name}: {found}")
            read = visits.key_blocks * tpu.KEY_BLOCK * self._token_bytes
            return _bundles(found, visits) / self.chip.clock_hz, read + operation.hbm_bytes

        return seconds(operations(compiled.hlo), self.chip, self.num_devices, kernel)

    @property
    def _token_bytes(self) -> float:
        return self.config.kv_bytes_per_token(ITEM_BYTES) / len(self.config.layers) / self.num_devices


class Visits(NamedTuple):
    """How often the loops of attention run in a layer: programs, sequences in one, and blocks of keys of a sequence."""

    programs: float
    sequences: float
    key_blocks: float


def _blocks(load: Load) -> Visits:
    blocks = [math.ceil((length + 1) / tpu.KEY_BLOCK) for length in load.contexts]
    programs = math.ceil(load.rows / tpu.DECODE_QUERY_BLOCK)
    return Visits(programs, load.rows, load.rows * sum(blocks) / len(blocks))


def _blocks_of_prompts(length: int) -> Visits:
    """Each block of queries reads all keys of its prompt, also those after it."""
    programs = PROMPT_TOKENS // tpu.EXTEND_QUERY_BLOCK
    return Visits(programs, programs, programs * math.ceil(length / tpu.KEY_BLOCK))


def _bundles(loops: Sequence[Loop], visits: Visits) -> float:
    program, sequence, block = (next(each.bundles for each in loops if each.depth == depth) for depth in (1, 2, 3))
    return visits.programs * (program - sequence) + visits.sequences * (sequence - block) + visits.key_blocks * block


def _rate(load: Load, step: float, prefill_of_token: float) -> float:
    return load.rows * load.answer / (load.answer * step + load.rows * load.prompt * prefill_of_token)


@functools.cache
def _config(model: str) -> ModelSpec:
    return read_shape(MODELS[model])


@functools.cache
def _weight_bytes(model: str) -> int:
    leaves = jax.tree.leaves(nnx.state(abstract_model(_config(model), jnp.bfloat16, "none")))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
