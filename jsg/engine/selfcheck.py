"""What a device can do at best, what a step must at least cost on it, and how near this engine's steps come to that.

`jsg check` prints it, and `bench.device` measures with the same functions.
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jsg.engine.device.executables import Executables
from jsg.engine.device.expert_load import ExpertLoad, expert_load
from jsg.engine.device.runner import ModelRunner
from jsg.engine.device.step import PackedInputs, packed_sizes
from jsg.models.config import ModelConfig
from jsg.sched.buckets import BucketKey, Buckets

REPEATS = 10
QUEUED_CALLS = 4
QUEUED_STEPS = 10
ROUNDS = 5
CONTEXT = 1024
RATES_SHARE = 0.3
"""Part of the time of a check that the rates of the device may take."""
COPY_BYTES = {"cpu": 2**27}
MATMUL_SIZE = {"cpu": 1024}
MAX_COPY_BYTES = 2**30
MAX_MATMUL_SIZE = 8192
FREE_PART = 4
"""The rates are measured beside a loaded engine, in a quarter of the memory that is free, because it lies in pieces."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rates:
    """What the device does at best, measured in the same run.

    Attributes:
        copy_bytes_per_s: Bytes read and written per second by a copy.
        matmul_flops_per_s: Of a large square matmul in the dtype of the model.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a step must move and compute, whatever the implementation; of several devices, the busiest one.

    Attributes:
        weight_bytes: Every weight but the embedding table, once; of several experts only those that run.
        kv_bytes: Keys and values of every row's context, once.
        matmul_flops: Of the products with weights.
        attention_flops: Of queries with keys, and of what follows with values.
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
        """The time below which a step cannot come whose kernels run one after another.

        Products with weights and attention alternate, layer by layer, so their times add; within each, the slower of
        memory and arithmetic counts.
        """
        products = max(self.weight_bytes / rates.copy_bytes_per_s, self.matmul_flops / rates.matmul_flops_per_s)
        attention = max(self.kv_bytes / rates.copy_bytes_per_s, self.attention_flops / rates.matmul_flops_per_s)
        return 1e3 * (products + attention)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """One shape of decode step: what it took and what it must at least take."""

    num_rows: int
    context: int
    ms: float
    floor_ms: float

    @property
    def part_of_floor(self) -> float:
        """1 is a step that could not be faster."""
        return self.floor_ms / self.ms

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all rows."""
        return 1e3 * self.num_rows / self.ms


@dataclasses.dataclass(frozen=True, slots=True)
class SelfCheck:
    """What was measured; `steps` lacks what there was no time, or no pool, for."""

    rates: Rates
    steps: tuple[StepTime, ...]

    def __str__(self) -> str:
        """Steps beside the least time that they need, by what the device was measured to do just before."""
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
    """The decode programs of an engine that runs no requests, and what their cost follows from.

    Attributes:
        runner: Calls the programs.
        buckets: Their shapes.
        model: The shape of the model.
        itemsize: Bytes of one weight.
        kernel_itemsize: Bytes of one weight of a layer's matmuls, which `--quantization` stores in one byte.
        bytes_per_token: Keys and values of one token in all layers.
        pool_tokens: Size of the KV pool.
        context_length: Tokens of one request at most.
        page_size: KV slots in one page.
        num_devices: That work at the same time.
        num_groups: Groups of them that have experts of their own.
    """

    runner: ModelRunner
    buckets: Buckets
    model: ModelConfig
    itemsize: int
    kernel_itemsize: int
    bytes_per_token: int
    pool_tokens: int
    context_length: int
    page_size: int
    num_devices: int = 1
    num_groups: int = 1

    def keys(self) -> list[BucketKey]:
        """The smallest, the middle and the largest shape; none in deterministic mode, which has no decode steps."""
        keys = self.buckets.decode
        return sorted({keys[0], keys[len(keys) // 2], keys[-1]}) if keys else []

    def context(self, key: BucketKey) -> int:
        """Cached tokens of each row: `CONTEXT`, or what context and pool hold. A row has its own pages."""
        own = self.pool_tokens // key.num_rows // self.page_size * self.page_size
        return min(CONTEXT, self.context_length - 1, own - 1)

    def time(self, key: BucketKey, rates: Rates, deadline: float) -> StepTime | None:
        """Times one shape until the deadline; None where the pool has no room for it.

        The page table is left filled; the pool and all other tables are as before.
        """
        context = self.context(key)
        if context < 1:
            return None
        self.runner.prepare_idle_steps(key)
        self.runner.write_pages(self._pages(key.num_rows, context + 1))
        ms = _step_ms(lambda: self.runner.run_idle_step(key, _pack(key, context, self.model.vocab_size)), deadline)
        cost = step_cost(
            self.model,
            self.itemsize,
            rows=key.num_rows,
            cached=context,
            new=1,
            kv_bytes_per_token=self.bytes_per_token,
            kernel_itemsize=self.kernel_itemsize,
            num_devices=self.num_devices,
            num_groups=self.num_groups,
        )
        return StepTime(num_rows=key.num_rows, context=context, ms=ms, floor_ms=cost.floor_ms(rates))

    def _pages(self, num_rows: int, num_tokens: int) -> np.ndarray:
        """A page table whose rows have pages of their own that lie anywhere in the pool, as after long service."""
        columns = -(-num_tokens // self.page_size)
        pages = np.zeros((self.runner.num_table_rows, self.runner.num_table_columns), np.int32)
        order = np.random.default_rng(0).permutation(self.pool_tokens // self.page_size)[: num_rows * columns] + 1
        pages[1 : num_rows + 1, :columns] = order.reshape(num_rows, columns)
        return pages


def check_steps(steps: DecodeSteps, dtype: jax.typing.DTypeLike, budget_s: float) -> SelfCheck:
    """Measures the device, then its decode steps, in about `budget_s` seconds: later ones may be left out."""
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
    """The best of several samples, in sizes that fit beside what the device holds already."""
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
    """Gigabytes read and written per second, of each of several passes over one large array.

    The array is donated, as the engine's are: fresh memory would be measured by what it costs to get it.
    """
    array = jnp.ones(num_bytes // 4, jnp.float32)
    add_one = _compiled(lambda x: x + 1, array, donate=(0,))

    def run() -> jax.Array:
        nonlocal array
        array = add_one(array)
        return array

    return [2 * num_bytes / 1e9 / s for s in _seconds(run, deadline)]


def matmul_rates(size: int, dtype: jax.typing.DTypeLike, deadline: float | None = None) -> list[float]:
    """Teraflops per second, of each of several `size` x `size` matmuls."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1))
    multiply = _compiled(functools.partial(jnp.matmul, preferred_element_type=jnp.float32), a, b)
    return [2 * size**3 / 1e12 / s for s in _seconds(lambda: multiply(a, b), deadline)]


def step_cost(
    config: ModelConfig,
    itemsize: int,
    *,
    rows: int,
    cached: int,
    new: int,
    kv_bytes_per_token: int | None = None,
    kernel_itemsize: int | None = None,
    num_devices: int = 1,
    num_groups: int = 1,
) -> Cost:
    """A step of `rows` requests with `new` tokens each over `cached` others, one row of logits for each.

    Activations, which can stay on the chip, are not counted, nor are the scales of kernels in 8 bits, nor what devices
    say to each other. Of several experts those count that the tokens choose: see `expert_load`.

    Args:
        config: The shape of the model.
        itemsize: Bytes of one weight.
        rows: Requests.
        cached: Tokens of each that are in the pool.
        new: New tokens of each.
        kv_bytes_per_token: Where keys and values are stored in another type than weights.
        kernel_itemsize: Bytes of one weight of the layers, where that is not `itemsize`.
        num_devices: That share the model; each has the router of experts.
        num_groups: Groups of them that have experts of their own.
    """
    width, heads_dim = config.hidden_size, config.num_heads * config.head_dim
    kv_dim = config.num_kv_heads * config.head_dim
    num_tokens = rows * new
    projections = (width * (heads_dim + 2 * kv_dim) + heads_dim * width) / num_devices
    block = 3 * width * config.intermediate_size * num_groups / num_devices  # a device's part of one feed-forward block
    load = ExpertLoad(1.0, float(num_tokens))
    if config.num_experts:
        load = expert_load(config.num_experts, config.experts_per_token, num_tokens, num_groups)
    read = config.num_layers * (projections + load.num_read * block)
    used = config.num_layers * (projections * num_tokens + load.num_copies * block)  # by all tokens
    head, routers = width * config.vocab_size / num_devices, config.num_layers * width * config.num_experts
    keys, pairs = zip(*(_keys_and_pairs(cached, new, window) for window in config.layer_windows), strict=True)
    per_token = config.kv_bytes_per_token(itemsize) if kv_bytes_per_token is None else kv_bytes_per_token
    return Cost(
        weight_bytes=round((kernel_itemsize or itemsize) * read + itemsize * (head + routers)),
        kv_bytes=per_token * rows * sum(keys) // config.num_layers // num_devices,
        matmul_flops=round(2 * (used + routers * num_tokens + head * rows)),
        attention_flops=4 * heads_dim * rows * sum(pairs) // num_devices,
    )


def _keys_and_pairs(cached: int, new: int, window: int | None) -> tuple[int, int]:
    """Of one row in one layer: the keys that are read, and how many keys its new tokens see in all."""
    total = cached + new
    window = total if window is None else window
    num_growing = min(new, max(0, window - cached))  # new tokens that do not fill the window yet
    pairs = num_growing * cached + num_growing * (num_growing + 1) // 2 + (new - num_growing) * window
    return min(total, window + new - 1), pairs


def _pack(key: BucketKey, context: int, vocab_size: int) -> np.ndarray:
    """A decode step of rows 1, 2, … with `context` cached tokens each; its tokens are written to the dump slot.

    The tokens differ, as those of requests do: equal ones would choose the same experts.
    """
    sizes = packed_sizes(key)
    packed = np.zeros(sum(sizes), np.int32)
    parts = dict(zip(PackedInputs._fields, np.split(packed, np.cumsum(sizes)[:-1]), strict=True))
    parts["counts"][2] = key.num_rows
    parts["token_ids"][:] = np.random.default_rng(0).integers(vocab_size, size=key.num_tokens)
    parts["positions"][:] = parts["model_positions"][:] = context
    parts["rows"][:] = np.arange(1, key.num_rows + 1)
    parts["logit_index"][:] = np.arange(key.num_rows)
    return packed


def _step_ms(run: Callable[[], jax.Array], deadline: float) -> float:
    """The least of several rounds of steps that are queued behind each other, as the engine queues them."""
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
    """Of `REPEATS` calls after two others; of fewer, but at least one, where the deadline comes first.

    Each is the mean of `QUEUED_CALLS` that are started behind each other, as steps are: what waiting costs is not part
    of a rate.
    """
    found: list[float] = []
    while len(found) < REPEATS + 2 and (deadline is None or not found or time.monotonic() < deadline):
        start = time.perf_counter()
        for _ in range(QUEUED_CALLS - 1):
            run()
        run().block_until_ready()
        found.append((time.perf_counter() - start) / QUEUED_CALLS)
    return found[2:] or found[-1:]
