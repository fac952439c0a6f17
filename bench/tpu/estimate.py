"""The modelled time of a model's steps on TPUs: compiled programs, at published rates of the chips.

Programs with one layer and with two are compiled. Their difference is a layer, so a step takes the time of the first
and as often that difference as there are more layers. All layers must be alike.
"""

import functools
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
from bench.tpu.chips import CHIPS
from bench.tpu.compiling import Compiled, Task
from bench.tpu.program import Kernel, Operation, operations, seconds
from jsg.engine.selfcheck import Cost, step_cost
from jsg.engine.shapes import ACCELERATOR_CHUNK
from jsg.kernels_pallas import tpu, tpu_write, vmem_rotate
from jsg.kernels_pallas.tile import QUERY_TILE
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


class Estimate:
    """A model on devices of a chip."""

    def __init__(self, chip: str, model: str, num_devices: int, kept: Path):
        """Compiles nothing until `compile`."""
        self.name, self.chip, self.model, self.num_devices, self._kept = chip, CHIPS[chip], model, num_devices, kept
        self.config = _config(model)
        self._programs: dict[tuple[tuple[str, int], int], Compiled] = {}

    def fits(self, load: Load) -> bool:
        """Whether weights and the keys and values of all requests, half through their answers, fit into memory."""
        if self.num_devices > self.chip.chips * self.chip.devices:
            return False
        tokens = load.rows * (load.prompt + load.answer // 2)
        held = _weight_bytes(self.model) + tokens * self.config.kv_bytes_per_token(ITEM_BYTES)
        return held / self.num_devices < MEMORY_SHARE * self.chip.memory_bytes

    def compile(self, loads: Sequence[Load]) -> None:
        """Compiles what the other methods need for these loads."""
        wanted = dict.fromkeys((kind, load.rows) for load in loads for kind in ("decode", "sample"))
        keys = [(program, layers) for program in (*wanted, ("extend", PROMPT_TOKENS)) for layers in (1, 2)]
        shape = MODELS[self.model]
        tasks = [Task(self.chip.target, shape, self.num_devices, layers, program) for program, layers in keys]
        self._programs |= zip(keys, compiling.compile_all(tasks, self._kept), strict=True)

    def step(self, load: Load) -> Mapping[str, float]:
        """The seconds of a decode step by kinds of operations, with the greedy choice of tokens."""
        found = Counter(self._all_layers(("decode", load.rows), _singles(load)))
        found.update(self._seconds(("sample", load.rows), 1, Tiles(1, ())))
        return found

    def prefill(self, load: Load) -> Mapping[str, float]:
        """The seconds of a step with `PROMPT_TOKENS` new tokens of prompts, by kinds of operations."""
        return self._all_layers(("extend", PROMPT_TOKENS), _tiles(load.prompt))

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

    def _all_layers(self, program: tuple[str, int], tiles: "Tiles") -> Mapping[str, float]:
        one, two = (self._seconds(program, layers, tiles) for layers in (1, 2))
        more = len(self.config.layers) - 1
        return {kind: one.get(kind, 0.0) + more * (two[kind] - one.get(kind, 0.0)) for kind in two}

    def _seconds(self, program: tuple[str, int], layers: int, tiles: "Tiles") -> Mapping[str, float]:
        compiled = self._programs[program, layers]
        token_bytes = self.config.kv_bytes_per_token(ITEM_BYTES) / len(self.config.layers) / self.num_devices

        def kernel(operation: Operation) -> tuple[str, float, float]:
            found = self._programs[program, 1].kernels.get(operation.of)
            if found is None:
                raise NotImplementedError(f"{operation.of} is a kernel of XLA's own, which says nothing of its loops")
            kind, cycles, slots = tiles.cost(operation.of, found, compiled.page_size)
            return kind, cycles / self.chip.clock_hz, slots * token_bytes + operation.hbm_bytes

        return seconds(operations(compiled.hlo), self.chip, self.num_devices, kernel)


class Tiles(NamedTuple):
    """The tiles of attention in a layer, of which each has one token or those of a part of a prompt.

    Attributes:
        size: The most tokens of one.
        keys: Of each real one, how many keys its last token sees.
    """

    size: int
    keys: tuple[int, ...]

    def cost(self, name: str, kernel: Kernel, page_size: int) -> tuple[str, float, float]:
        """What a kernel counts as, its bundles, and the slots of the pool that it reads and writes.

        Of a kernel that is not named here each program runs all of its code once.
        """
        if name.startswith("attention_of_"):
            return "attention", *self._attention(int(name.rpartition("_")[2]), kernel, page_size)
        if name == "write_by_head":
            # Neighbours of a prompt are written together.
            run, size = kernel.bundles(-1), tpu_write.granule(jnp.bfloat16)
            runs = len(self.keys) * -(-self.size // size)
            return "kernel", runs * run + kernel.programs * (kernel.bundles(-2) - run), 2 * runs * size
        if name == "rotated":
            turns = len(self.keys) * self.size / vmem_rotate.AT_ONCE
            inner, outer = kernel.bundles(-1), kernel.bundles(-2)
            return "kernel", kernel.programs * (outer - inner) + turns * inner, 0
        if kernel.deepest > 1:
            raise NotImplementedError(f"nobody has said how often the loops of {name} run: {kernel}")
        return "kernel", kernel.programs * kernel.bundles(-1), 0

    def _attention(self, size: int, kernel: Kernel, page_size: int) -> tuple[float, float]:
        """Loops inside each other are those of programs, of the tiles of one, of blocks of keys, and of pages.

        The copies of the pages of a block that is not whole are begun in one loop of the last kind and awaited in
        another. Code for those of a whole block counts for each block.
        """
        program, tile, block = (kernel.bundles(depth) for depth in (-4, -3, -2))
        page = sum(each.bundles for each in kernel.loops if each.depth == kernel.deepest)
        keys = self.keys if size == self.size else ()  # the others have no real tile in this step
        blocks, pages = (sum(-(-each // every) for each in keys) for every in (tpu.KEY_BLOCK, page_size))
        apart = sum(-(-each // page_size) % (tpu.KEY_BLOCK // page_size) for each in keys)
        cycles = kernel.programs * (program - tile) + len(keys) * (tile - block)
        return cycles + blocks * (block - page) + apart * page, pages * page_size


def _singles(load: Load) -> Tiles:
    """One new token of each request, all at other places of their answers."""
    step = load.answer / load.rows
    return Tiles(1, tuple(load.prompt + 1 + int(step * index) for index in range(load.rows)))


def _tiles(length: int) -> Tiles:
    """Whole prompts of this length."""
    of_prompt = range(QUERY_TILE, length + QUERY_TILE, QUERY_TILE)
    keys = [min(end, length) for end in of_prompt] * (PROMPT_TOKENS // length)
    return Tiles(QUERY_TILE, tuple(keys))


def _rate(load: Load, step: float, prefill_of_token: float) -> float:
    return load.rows * load.answer / (load.answer * step + load.rows * load.prompt * prefill_of_token)


@functools.cache
def _config(model: str) -> ModelSpec:
    return read_shape(MODELS[model])


@functools.cache
def _weight_bytes(model: str) -> int:
    leaves = jax.tree.leaves(nnx.state(abstract_model(_config(model), jnp.bfloat16, "none")))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
