"""Measures the best that a device can do and the decode steps of this engine, and compares the two.

`jsg check` prints it, and `bench.device` measures with the same functions.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jsg.engine.device.executables import Executables
from jsg.engine.device.expert_load import ExpertLoad, expert_load
from jsg.engine.device.packing import PIECES, empty_step
from jsg.engine.device.programs import RunnerConfig
from jsg.engine.device.runner import ModelRunner
from jsg.models.block_spec import ExpertsSpec
from jsg.models.spec import ModelSpec
from jsg.sched.buckets import BucketKey
from jsg.window import Window

REPEATS = 10
QUEUED_CALLS = 4
QUEUED_STEPS = 10
ROUNDS = 5
CONTEXT = 1024
RATES_SHARE = 0.3
"""Part of the time of a check that measuring the device may take."""
COPY_BYTES = {"cpu": 2**27}
MATMUL_SIZE = {"cpu": 1024}
MAX_COPY_BYTES = 2**30
MAX_MATMUL_SIZE = 8192
FREE_PART = 4
"""The device is measured beside a loaded engine, in a quarter of the free memory, which may lie in pieces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """The best that the device does, measured in the same run.

    Attributes:
        copy_bytes_per_s: Bytes read and written per second by a copy.
        matmul_flops_per_s: Operations per second of a large square matmul in the dtype of the model.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What every implementation of a step must move and compute, on the busiest of several devices.

    Attributes:
        weight_bytes: Every weight but the embedding table, once, and of the experts only those that run.
        kv_bytes: Keys and values of every row's context, once.
        matmul_flops: Operations of the products with weights.
        attention_flops: Operations of the products with keys and with values.
    """

    weight_bytes: int
    kv_bytes: int
    matmul_flops: int
    attention_flops: int

    @property
    def num_bytes(self) -> int:
        """All bytes."""
        return self.weight_bytes + self.kv_bytes

    @property
    def num_flops(self) -> int:
        """All floating-point operations."""
        return self.matmul_flops + self.attention_flops

    def floor_ms(self, rates: Rates) -> float:
        """The least time of a step whose kernels run one after another.

        Products with weights and attention alternate, layer by layer, so their times add up. In each of them the slower
        one of memory and arithmetic counts.
        """
        products = max(self.weight_bytes / rates.copy_bytes_per_s, self.matmul_flops / rates.matmul_flops_per_s)
        attention = max(self.kv_bytes / rates.copy_bytes_per_s, self.attention_flops / rates.matmul_flops_per_s)
        return 1e3 * (products + attention)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """The time that one shape of decode step took, and the least time that it must take."""

    num_rows: int
    context: int
    ms: float
    floor_ms: float

    @property
    def part_of_floor(self) -> float:
        """The floor as a part of the time; 1 for a step that could not be faster."""
        return self.floor_ms / self.ms

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all rows per second."""
        return 1e3 * self.num_rows / self.ms


@dataclasses.dataclass(frozen=True, slots=True)
class SelfCheck:
    """The measurements. `steps` has no shape for which time or pool were too small."""

    rates: Rates
    steps: tuple[StepTime, ...]

    def __str__(self) -> str:
        """A table of steps with their least times, which follow from the rates that were measured before."""
        lines = [
            f"this device copies {self.rates.copy_bytes_per_s / 1e9:.1f} GB/s and multiplies matrices at "
            f"{self.rates.matmul_flops_per_s / 1e12:.2f} TFLOP/s, from which the floor of a step follows",
            f"{'decode step':<28}{'ms':>10}{'floor ms':>10}{'of floor':>10}{'tokens/s':>10}",
        ]
        for step in self.steps:
            name = f"{step.num_rows} row{'s' * (step.num_rows > 1)}, {step.context} cached"
            figures = f"{step.ms:>10.3f}{step.floor_ms:>10.3f}{step.part_of_floor:>10.0%}{step.tokens_per_s:>10.0f}"
            lines.append(f"{name:<28}{figures}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSteps:
    """The decode programs of an engine that runs no requests, and their cost.

    Attributes:
        runner: Calls the programs.
        cost: `step_cost` of the model on its devices.
        vocab_size: Rows of the model's vocabulary.
        num_pages: For each page group the pages of its pool, page 0 included.
        context_length: Tokens of one request at most.
        page_size: KV slots in one page.
    """

    runner: ModelRunner
    cost: Callable[..., Cost]
    vocab_size: int
    num_pages: tuple[int, ...]
    context_length: int
    page_size: int

    def keys(self) -> list[BucketKey]:
        """The smallest, the middle and the largest shape; none in deterministic mode, which has no decode steps."""
        keys = self.runner.programs.buckets.decode
        return sorted({keys[0], keys[len(keys) // 2], keys[-1]}) if keys else []

    def context(self, key: BucketKey) -> int:
        """Cached tokens of each row: `CONTEXT`, or what context and pool hold. Every row has its own pages."""
        own = (min(self.num_pages) - 1) // key.num_rows * self.page_size
        return min(CONTEXT, self.context_length - 1, own - 1)

    def time(self, key: BucketKey, rates: Rates, deadline: float) -> StepTime | None:
        """Times one shape until the deadline; None if the pool has no room for it.

        It leaves the page table filled, and the pool and all other tables unchanged.
        """
        context = self.context(key)
        if context < 1:
            return None
        self.runner.prepare_idle_steps(key)
        pages = self._pages(key.num_rows, context + 1)
        self.runner.write_pages(range(1, len(pages)), pages, (None,) * len(self.num_pages))
        packed = _pack(key, context, self.runner.programs.config)
        ms = _step_ms(lambda: self.runner.run_idle_step(key, packed), deadline)
        floor_ms = self.cost(rows=key.num_rows, cached=context, new=1).floor_ms(rates)
        return StepTime(num_rows=key.num_rows, context=context, ms=ms, floor_ms=floor_ms)

    def _pages(self, num_rows: int, num_tokens: int) -> np.ndarray:
        """A page table whose rows have pages of their own in random places of the pool, as after long service."""
        columns = -(-num_tokens // self.page_size)
        num_table_rows, width = self.runner.replica.state.page_table.shape
        pages = np.zeros((num_table_rows // len(self.num_pages), width), np.int32)
        num_rows = min(num_rows, len(pages) - 1)  # shapes are rounded up, and more rows than the table has repeat these
        order = np.random.default_rng(0).permutation(min(self.num_pages) - 1)[: num_rows * columns] + 1
        pages[1 : num_rows + 1, :columns] = order.reshape(num_rows, columns)
        return pages


def check_steps(steps: DecodeSteps, dtype: jax.typing.DTypeLike, budget_s: float) -> SelfCheck:
    """Measures the device, then decode steps, in about `budget_s` seconds. The last steps may be left out."""
    start = time.monotonic()
    rates = measure_rates(dtype, start + RATES_SHARE * budget_s)
    found: list[StepTime] = []
    keys = steps.keys()
    for index, key in enumerate(keys):
        now, end = time.monotonic(), start + budget_s
        if found and now > end:
            break
        timed = steps.time(key, rates, now + max(0.0, end - now) / (len(keys) - index))
        found += [timed] if timed else []
    return SelfCheck(rates, tuple(found))


def measure_rates(dtype: jax.typing.DTypeLike, deadline: float | None = None) -> Rates:
    """The best of several samples, in sizes that fit into the free memory of the device."""
    device = jax.devices()[0]
    copy_bytes = COPY_BYTES.get(device.platform, MAX_COPY_BYTES)
    size = MATMUL_SIZE.get(device.platform, MAX_MATMUL_SIZE)
    if (memory := device.memory_stats()) is not None and "bytes_limit" in memory:
        room = max(2**24, (memory["bytes_limit"] - memory["bytes_in_use"]) // FREE_PART)
        copy_bytes = min(copy_bytes, room // 2**20 * 2**20)
        while 16 * size**2 > room:  # two factors, a float32 product, and the one before it
            size //= 2
    copies = copy_rates(copy_bytes, deadline)
    return Rates(1e9 * max(copies), 1e12 * max(matmul_rates(size, dtype, deadline)))


def copy_rates(num_bytes: int, deadline: float | None = None) -> list[float]:
    """Gigabytes read and written per second, in each of several passes over one large array.

    The array is donated, as those of the engine are, because allocating memory would take time of its own.
    """
    array = jnp.ones(num_bytes // 4, jnp.float32)
    add_one = _compiled(lambda x: x + 1, array, donate=(0,))

    def run() -> jax.Array:
        nonlocal array
        array = add_one(array)
        return array

    return [2 * num_bytes / 1e9 / s for s in _seconds(run, deadline)]


def matmul_rates(size: int, dtype: jax.typing.DTypeLike, deadline: float | None = None) -> list[float]:
    """Teraflops per second of several matmuls of `size` x `size`."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    multiply = _compiled(functools.partial(jnp.matmul, preferred_element_type=jnp.float32), a, b)
    return [2 * size**3 / 1e12 / s for s in _seconds(lambda: multiply(a, b), deadline)]


def step_cost(
    config: ModelSpec,
    itemsize: int,
    *,
    rows: int,
    cached: int,
    new: int,
    kv_bytes_per_token: int | None = None,
    kernel_itemsize: float | None = None,
    num_devices: int = 1,
    num_groups: int = 1,
) -> Cost:
    """The cost of a step of `rows` requests with `new` tokens behind `cached` others, and one row of logits each.

    It does not count activations, which can stay on the chip, the scales of kernels in 8 bits, and what devices
    exchange. Of the experts it counts those that tokens choose: see `expert_load`.

    Args:
        config: The shape of the model.
        itemsize: Bytes of one weight.
        rows: Requests.
        cached: Tokens of each request that are in the pool.
        new: New tokens of each request.
        kv_bytes_per_token: Bytes of keys and values, where their type is not that of weights.
        kernel_itemsize: Bytes of one weight of the layers, where it is not `itemsize`.
        num_devices: Devices that share the model. Each has the whole router of experts.
        num_groups: Groups of devices that have experts of their own.
    """
    width, num_tokens = config.hidden_size, rows * new
    read = used = routers = 0.0  # numbers of kernels: those that are read, those that all tokens use, and of routers
    keys = pairs = 0  # numbers of keys that are read, and pairs of a new token's number and a key's
    for layer, count in collections.Counter(config.layers).items():
        attention = layer.attention
        projections = attention.num_weights(width) / num_devices
        if layer.own_input is not None:
            projections += layer.own_input.num_weights(width)
        read, used = read + count * projections, used + count * projections * num_tokens
        for mlp in layer.blocks:
            load = ExpertLoad(1.0, float(num_tokens))
            block = mlp.num_weights(width) / num_devices
            if isinstance(mlp, ExpertsSpec):
                load = expert_load(mlp.count, mlp.router.choice.per_token, num_tokens, num_groups)
                block *= num_groups  # a device has a part of its group's experts only
                routers += count * mlp.num_weights_of_all(width)
                if mlp.shared is not None:
                    shared = mlp.shared.num_weights(width) / num_devices
                    read, used = read + count * shared, used + count * shared * num_tokens
            read += count * load.num_read * block
            used += count * load.num_copies * block
        num_keys, num_pairs = _keys_and_pairs(cached, new, attention.window)
        keys += count * num_keys * (0 if attention.kv_shape is None else attention.kv_shape.numbers)
        pairs += count * num_pairs * attention.pair_numbers
    head = width * config.vocab_size / num_devices
    per_token = config.kv_bytes_per_token(itemsize) if kv_bytes_per_token is None else kv_bytes_per_token
    return Cost(
        weight_bytes=round((kernel_itemsize or itemsize) * read + itemsize * (head + routers)),
        kv_bytes=per_token * rows * keys // sum(shape.numbers for shape in config.kv_shapes) // num_devices
        + 2 * rows * config.state_bytes(itemsize) // num_devices,  # a state is read and written
        matmul_flops=round(2 * (used + routers * num_tokens + head * rows)),
        attention_flops=4 * rows * pairs // num_devices,
    )


def _keys_and_pairs(cached: int, new: int, window: Window | None) -> tuple[int, int]:
    """For one row in one layer: the keys that are read, and the pairs of a new token and a key that it sees."""
    positions = np.arange(cached, cached + new)
    firsts = np.zeros_like(positions) if window is None else np.maximum(window.first(positions), 0)
    return cached + new - int(firsts[0]), int((positions + 1 - firsts).sum())


def _pack(key: BucketKey, context: int, config: RunnerConfig) -> np.ndarray:
    """A decode step of rows 1, 2, … with `context` cached tokens each, which writes to the dump slot.

    Its tokens differ, as those of requests do, because equal tokens would choose the same experts.
    """
    packed, parts = empty_step(key, **config.kinds)
    parts["counts"][2] = key.num_rows
    parts["token_ids"][:] = np.random.default_rng(0).integers(config.vocab_size, size=key.num_tokens)
    parts["positions"][:] = parts["model_positions"][:] = context
    index = np.arange(key.num_rows)
    parts["rows"][:] = rows = index % (config.num_rows - 1) + 1
    parts["logit_index"][:] = index
    if config.has_states:
        one = np.ones_like(index)
        parts[PIECES].reshape(-1, key.num_rows)[:] = index, one, rows, rows, one * context, one - one
    return packed


def _step_ms(run: Callable[[], jax.Array], deadline: float) -> float:
    """The least time of several rounds of steps, which are queued one behind another as in the engine."""
    best = float("inf")
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        queued = [run() for _ in range(QUEUED_STEPS if best < float("inf") else 1)]
        queued[-1].block_until_ready()
        best = min(best, 1e3 * (time.perf_counter() - start) / len(queued))
        if time.monotonic() + QUEUED_STEPS * best / 1e3 > deadline:
            break
    return best


def _compiled(fn: Callable[..., jax.Array], *args: jax.Array, donate: tuple[int, ...] = ()) -> Callable[..., jax.Array]:
    programs = Executables(forbid_compile=False)
    programs.lower("it", fn, *args, donate=donate)
    programs.compile(["it"])
    return functools.partial(programs, "it")


def _seconds(run: Callable[[], jax.Array], deadline: float | None) -> list[float]:
    """Seconds of `REPEATS` calls after two others, or of fewer calls, but at least one, until the deadline.

    Each figure is the mean of `QUEUED_CALLS` that are queued one behind another, as steps are, so that waiting is not
    part of a rate.
    """
    found: list[float] = []
    while len(found) < REPEATS + 2 and (deadline is None or not found or time.monotonic() < deadline):
        start = time.perf_counter()
        for _ in range(QUEUED_CALLS - 1):
            run()
        run().block_until_ready()
        found.append((time.perf_counter() - start) / QUEUED_CALLS)
    return found[2:] or found[-1:]
